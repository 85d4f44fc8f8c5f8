"""Inspect AI (https://inspect.aisi.org.uk) on a Djinn server: evaluations that see and change the inside of the model.

    inspect eval arc.py --model djinn/smollm2-135m-instruct

    steering = {"layer": 15, "action": "edit", "edits": [{"op": "add", "vector": "cheerful"}]}
    states = {"point": "resid_post", "layers": [10, 20], "action": "capture"}
    model = get_model("djinn/smollm2-135m-instruct", breakpoints=[steering, states], captures="activations")
    await model.api.points()  # what breakpoints can name

Every call has a session of its own with these `breakpoints`, in the words of `POST /v1/sessions/{id}/breakpoints`.
Calls with the same edits share the KV of what their messages have in common. Captures go to a file for each call in the
folder `captures`, which `client.captures.parse_captures` reads. The output's `metadata` has its path, and the probes'
values, under `djinn`. All else, tools and structured answers too, goes as to any server of OpenAI's API.

`pip install 'djinn-client[inspect]'` is all: Inspect finds this provider by itself.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_ai.model import GenerateConfig, ModelOutput, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI

from client import breakpoint_calls, calls
from client._async.client import AsyncDjinn
from client.breakpoint_models import PointInfo
from client.calls import Call
from client.edge import DEFAULT_TIMEOUT_S, KEY_VARIABLE, Connection, address_of
from client.errors import ConnectionFailed, RateLimited, ServerError
from client.retries import DEFAULT_RETRIES
from client.transport import AsyncTransport


@modelapi(name="djinn")
class DjinnAPI(OpenAICompatibleAPI):
    """The models of a Djinn server."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 (as Inspect's own)
        breakpoints: Sequence[Mapping[str, Any]] = (),
        captures: str | None = None,
        **model_args: Any,
    ) -> None:
        """Without `base_url` and `api_key` they are `DJINN_BASE_URL` and `DJINN_API_KEY`, as `Djinn` has them.

        Raises ValueError for a breakpoint that pauses, and for one that captures without a folder for that.
        """
        actions = {str(each.get("action", "pause")) for each in breakpoints}
        if "pause" in actions or any(each.get("probe", {}).get("then") == "pause" for each in breakpoints):
            raise ValueError("breakpoints: one that pauses is not for an evaluation, where nobody resumes")
        if ("capture" in actions) != (captures is not None):
            raise ValueError("captures: a folder goes with breakpoints that capture")
        key = api_key or os.environ.get(KEY_VARIABLE) or None
        self._at = Connection(address_of(base_url), key, DEFAULT_TIMEOUT_S, DEFAULT_RETRIES)
        self._breakpoints = [dict(each) for each in breakpoints]
        self._folder = None if captures is None else Path(captures)
        url = f"{str(self._at.url).rstrip('/')}/v1"
        super().__init__(model_name, url, key or "none", config, service="djinn", **model_args)

    async def points(self) -> tuple[PointInfo, ...]:
        """The points of the model's pass that breakpoints can name."""
        async with AsyncDjinn(self._at.base_url, api_key=self._at.api_key) as djinn:
            return await djinn.points()

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig) -> Any:
        """Inspect's call: in a session, which is closed at its end."""
        transport = AsyncTransport(self._at)  # of its own: evaluations run on one event loop after the other
        try:
            session = (await transport.send(calls.create_session(None, None, None, None))).id
            try:
                for body in self._breakpoints:
                    await transport.send(breakpoint_calls.arm(session, body))
                headers = {**(config.extra_headers or {}), "X-Session-ID": session}
                bound = config.model_copy(update={"extra_headers": headers})
                answer = await super().generate(input, tools, tool_choice, bound)
                output, call = answer if isinstance(answer, tuple) else (answer, None)
                if isinstance(output, ModelOutput):
                    told = {"session": session, **(((call and call.response) or {}).get("djinn") or {})}
                    if self._folder is not None:
                        told["captures"] = str(await self._keep(transport, session))
                    output.metadata = {**(output.metadata or {}), "djinn": told}
                return answer
            finally:
                await transport.send(calls.close_session(session))
        finally:
            await transport.close()

    async def _keep(self, transport: AsyncTransport, session: str) -> Path:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{session}.safetensors"
        await transport.download(Call("GET", calls.session_path(session, "captures"), calls.nothing), path)
        return path

    def should_retry(self, ex: BaseException) -> Any:
        """Also where the server is full, away or starting again."""
        return isinstance(ex, (ConnectionFailed, RateLimited, ServerError)) or super().should_retry(ex)
