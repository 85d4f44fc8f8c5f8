# Generated from client/_async by `python client/_generate.py`: make changes there.
"""A session: its turns, its phase, and control of it between its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from client import breakpoint_calls, calls
from client._sync.breakpoints import Breakpoint, Checkpoint
from client._sync.live import live_events
from client._sync.trace import trace_turn
from client._sync.turn import TurnStream, stream_turn
from client.breakpoint_models import Attribution, Features, LensMap, Norms, OnTimeout, Pass, Positions
from client.calls import UNSET, Seconds, TurnOptions, given
from client.captures import Captures
from client.edits import (
    EditOptions,
    Feature,
    Kept,
    Until,
    Vector,
    Where,
    capture_body,
    features_body,
    pause_body,
    probe_body,
    steer_body,
)
from client.errors import DjinnError, NotFound
from client.history_models import Timeline
from client.live import Event
from client.models import History, Move, Phase, PhaseChange, SessionInfo, Turn
from client.trace import Trace
from client.transport import Transport


class Session:
    """A session on the server. `info` is what the server last said about it.

    As a context manager it is closed at the end of the block if this object has opened it. One that was found by its
    id stays. Each call takes a `timeout` in seconds for the server's silence; `with_options` changes it for all.
    """

    def __init__(self, transport: Transport, info: SessionInfo, *, is_found: bool = False) -> None:
        self._transport = transport
        self._is_found = is_found
        self.info = info

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, state={self.info.state!r}, tokens={self.info.tokens})"

    def _repr_svg_(self) -> str:
        return self.info._repr_svg_()

    def explain(self) -> str:
        """The link to the server's page that shows the inside of the model for this session."""
        return f"{self._transport.address.rstrip('/')}/#/sessions/{calls.path_part(self.id)}/model"

    @property
    def id(self) -> str:
        """The id that other calls and other clients know the session by."""
        return self.info.id

    def with_options(self, *, timeout: Seconds = UNSET, max_retries: int | None = None) -> Session:
        """The same session for calls with another timeout, in seconds, or another number of retries."""
        return Session(self._transport.with_options(timeout, max_retries), self.info, is_found=True)

    def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool | None = None,
        logit_bias: Mapping[int, float] | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        timeout: Seconds = UNSET,
    ) -> Turn:
        """Run one turn and wait for its end, or until a breakpoint pauses it.

        It runs on exactly one of `prompt`, `messages` and `token_ids`, with only what is new since the last turn: the
        server keeps the history. It also has the defaults.
        """
        return self._transport.send(calls.generate(self.id, given(locals()), stream=False), timeout)

    def stream(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool | None = None,
        logit_bias: Mapping[int, float] | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        timeout: Seconds = UNSET,
    ) -> AbstractContextManager[TurnStream]:
        """Run one turn like `generate` and read its tokens as they come. Leaving the block early cancels the turn."""
        return stream_turn(self._transport, calls.generate(self.id, given(locals()), stream=True), timeout)

    def trace(self, *, timeout: Seconds = UNSET, **options: Unpack[TurnOptions]) -> AbstractContextManager[Trace]:
        """Run one turn with what the block says: `trace["resid_post", 15].save()`, `trace["z", 5].edit(scale=0.5)`.

        The turn takes what `generate` takes, and runs at the end of the block: see `client.trace`. Without `max_tokens`
        only the prompt is computed. What it saved is no longer among `captures`, unless these have others' too. If a
        breakpoint of yours pauses the turn, the trace has what was computed so far, and its edits end there.
        """
        return trace_turn(self._transport, self.id, {"max_tokens": 0, **options}, timeout)

    def cancel(self, *, timeout: Seconds = UNSET) -> SessionInfo:
        """End the running or paused turn, even of another client; its reader gets its text. Raises `Conflict`."""
        self.info = self._transport.send(calls.cancel_turn(self.id), timeout)
        return self.info

    def fork(self, *, timeout: Seconds = UNSET) -> Session:
        """A new session with the same history and breakpoints, and paused in the same place if this one is paused."""
        return Session(self._transport, self._transport.send(calls.fork_session(self.id), timeout))

    def export_to(self, path: str | Path, *, timeout: Seconds = UNSET) -> None:
        """Write the session to a file that `djinn.sessions.import_from` takes. Raises `Conflict` under a turn."""
        self._transport.download(calls.export_session(self.id), Path(path), timeout)

    def move(self, replica: str, *, timeout: Seconds = UNSET) -> Move:
        """Move the session to another server of the cluster, KV included. Only an operator may.

        Any server of the cluster finds it then. Raises `Conflict`
        where there is no cluster.
        """
        return self._transport.send(calls.move_session(self.id, replica), timeout)

    def label(self, labels: Mapping[str, str | None], *, timeout: Seconds = UNSET) -> SessionInfo:
        """Set these labels; None takes one away, and the others stay. Lists show the label `name` first."""
        self.info = self._transport.send(calls.label_session(self.id, labels), timeout)
        return self.info

    def rewind(self, to_token: int, *, timeout: Seconds = UNSET) -> SessionInfo:
        """Drop every token of the history from position `to_token` on."""
        self.info = self._transport.send(calls.rewind_session(self.id, to_token), timeout)
        return self.info

    def history(self, *, pieces: bool = False, timeout: Seconds = UNSET) -> History:
        """Every token of the session, and their text."""
        return self._transport.send(calls.get_history(self.id, pieces=pieces), timeout)

    def events(self, *, after: str | None = None, timeout: Seconds = UNSET) -> AbstractContextManager[Iterator[Event]]:
        """What happens to the session from now on, until it is closed; see `djinn.events`."""
        return live_events(self._transport, after, timeout, self.id)

    def set_phase(self, phase: Phase, *, resume_in_ms: float | None = None, timeout: Seconds = UNSET) -> PhaseChange:
        """Say what the session is doing; with `io_wait` and `idle`, also when it will go on. Raises `Conflict`.

        Returns without waiting for KV that moves because of it.
        """
        return self._transport.send(calls.set_phase(self.id, phase, resume_in_ms), timeout)

    @contextmanager
    def io_wait(self, *, resume_in_ms: float | None = None, timeout: Seconds = UNSET) -> Iterator[PhaseChange]:
        """Go around a tool call: the phase is `io_wait` in the block, and `ready` after it, also if it raises.

        `resume_in_ms` is how long the block will take, as far as is known: KV is then back when it ends.
        """
        change = self.set_phase("io_wait", resume_in_ms=resume_in_ms, timeout=timeout)
        try:
            yield change
        except BaseException:
            with suppress(DjinnError):  # the block's own error tells more
                self.set_phase("ready", timeout=timeout)
            raise
        self.set_phase("ready", timeout=timeout)

    def refresh(self, *, timeout: Seconds = UNSET) -> SessionInfo:
        """Ask the server how the session is."""
        self.info = self._transport.send(calls.get_session(self.id), timeout)
        return self.info

    def close(self, *, timeout: Seconds = UNSET) -> None:
        """End the session; the server frees everything it held. One that is gone already counts as closed."""
        with suppress(NotFound):
            self._transport.send(calls.close_session(self.id), timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_rest: object) -> None:
        if self._is_found:
            return
        with nullcontext() if raised is None else suppress(DjinnError):  # the block's own error tells more
            self.close()

    def break_at(
        self,
        *,
        layer: int | None = None,
        layers: Sequence[int] | None = None,
        point: str | None = None,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        once: bool | None = None,
        timeout_s: float | None = None,
        on_timeout: OnTimeout | None = None,
        where: Where | None = None,
        timeout: Seconds = UNSET,
    ) -> Breakpoint:
        """Pause at a point of a layer: `break_at(layer=6)` stops every pass after layer 6, until `resume`.

        After `timeout_s` seconds (600) the server goes on (`resume`, the default) or ends the turn (`abort`).

        It acts at `point` (`resid_post`, after the layer, unless another of `Djinn.points` is given) of `layer`, or of
        each of `layers`, at the positions of the history for which all conditions hold that are given. `when_pass` is
        `prefill` (over a turn's new context), `decode` (over one generated token) or `any`, the default. `position` is
        one position, `token_id` the token that stands there, and `every` n takes positions that n divides. `where` is
        about a value there. With `once` the breakpoint is gone after the first time.
        """
        return self._arm(pause_body(given(locals())), timeout)

    def capture_at(
        self,
        *,
        layer: int | None = None,
        layers: Sequence[int] | None = None,
        point: str | None = None,
        heads: Sequence[int] | None = None,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        once: bool | None = None,
        where: Where | None = None,
        timeout: Seconds = UNSET,
    ) -> Breakpoint:
        """Record what stands at a point of a layer, for `captures`, and go on; of `heads` only these.

        The place and the conditions are as in `break_at`: `capture_at(layer=6, point="pattern", heads=[0, 3])`.
        """
        return self._arm(capture_body(given(locals())), timeout)

    def probe(
        self,
        name: str,
        *,
        above: float | None = None,
        then: Literal["stop", "pause"] | None = None,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        once: bool | None = None,
        timeout: Seconds = UNSET,
    ) -> Breakpoint:
        """Read an uploaded probe at each position, for `Turn.probes`. Where it finds more than `above`, the turn stops
        before its next token, or pauses.
        """
        return self._arm(probe_body(given(locals())), timeout)

    def tell_features(
        self,
        dictionary: str,
        *,
        top_k: int | None = None,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        once: bool | None = None,
        timeout: Seconds = UNSET,
    ) -> Breakpoint:
        """Tell the `top_k` (10) most active features of an uploaded dictionary at each position, in `Turn.features`."""
        return self._arm(features_body(given(locals())), timeout)

    def steer(
        self,
        *,
        layer: int | None = None,
        layers: Sequence[int] | None = None,
        point: str | None = None,
        when_pass: Pass | None = None,
        position: int | None = None,
        token_id: int | None = None,
        every: int | None = None,
        once: bool | None = None,
        scale: float | None = None,
        add: Vector | Literal[True] | None = None,
        replace: Vector | Literal[True] | None = None,
        project_out: Vector | None = None,
        clamp: Vector | Literal[True] | None = None,
        ablate: Literal[True] | Vector | None = None,
        factor: float | None = None,
        source: Kept | None = None,
        feature: Feature | None = None,
        orthogonal_to: Vector | None = None,
        heads: Sequence[int] | None = None,
        neurons: Sequence[int] | None = None,
        experts: Sequence[int] | None = None,
        positions: Positions | None = None,
        keep_norm: bool | None = None,
        max_norm: float | None = None,
        where: Where | None = None,
        timeout: Seconds = UNSET,
    ) -> Breakpoint:
        """Change what stands at a point of a layer, `steer(layer=6, scale=0.9)`, until the breakpoint is removed.

        The place and the conditions are as in `break_at`, the change is as in `EditOptions`.
        """
        return self._arm(steer_body(given(locals())), timeout)

    def _arm(self, body: Mapping[str, Any], timeout: Seconds) -> Breakpoint:
        info = self._transport.send(breakpoint_calls.arm(self.id, body), timeout)
        return Breakpoint(self._transport, self.id, info)

    def breakpoints(self, *, timeout: Seconds = UNSET) -> list[Breakpoint]:
        """What is armed, in the order in which it acts."""
        found = self._transport.send(breakpoint_calls.list_breakpoints(self.id), timeout)
        return [Breakpoint(self._transport, self.id, info) for info in found]

    def clear_breakpoints(self, *, timeout: Seconds = UNSET) -> None:
        """Remove every breakpoint."""
        self._transport.send(breakpoint_calls.clear_breakpoints(self.id), timeout)

    def checkpoint(self, *, timeout: Seconds = UNSET) -> Checkpoint:
        """Where the session is paused. Raises `Conflict` if it is not."""
        info = self._transport.send(breakpoint_calls.get_checkpoint(self.id), timeout)
        return Checkpoint(self._transport, self.id, info)

    def resume(
        self, *, until: Until | None = None, edits: Sequence[EditOptions] = (), timeout: Seconds = UNSET
    ) -> Turn:
        """Go on with the paused turn and wait for its end or its next pause; `edits` are made first.

        Without `until` the next breakpoint pauses it. Raises `Conflict` if the session is not paused.
        """
        return self._transport.send(breakpoint_calls.resume(self.id, until, edits, stream=False), timeout)

    def resume_stream(
        self, *, until: Until | None = None, edits: Sequence[EditOptions] = (), timeout: Seconds = UNSET
    ) -> AbstractContextManager[TurnStream]:
        """Go on like `resume` and read new tokens as they come. Leaving the block early cancels the turn."""
        return stream_turn(self._transport, breakpoint_calls.resume(self.id, until, edits, stream=True), timeout)

    def step(self, *, layer: int | None = None, point: str | None = None, timeout: Seconds = UNSET) -> Turn:
        """Go on to a `point` of `layer` in this pass (after it, unless a point is given), or without a layer to the
        same place in the pass of the next token, and pause there.
        """
        until: Until = "next_token" if layer is None else layer if point is None else (layer, point)
        return self.resume(until=until, timeout=timeout)

    def lens_map(
        self,
        *,
        positions: Positions = "last",
        layers: Sequence[int] | None = None,
        top_k: int = 1,
        lens: str | None = None,
        tokens: Sequence[int] | None = None,
        measures: bool = False,
        beside: str | None = None,
        timeout: Seconds = UNSET,
    ) -> LensMap:
        """The logit lens, or the uploaded one called `lens`, at every layer that `capture_at` has recorded, and where
        the session is paused. It also tells the ranks of `tokens`, with `measures` entropies and divergences, and how
        it differs from the session with the id `beside` at the same places.

        At most 64 positions. While turns run, it takes its time: it gives way to their tokens.
        """
        call = breakpoint_calls.read_lens_map(
            self.id, positions, layers, top_k, lens, tokens, measures=measures, beside=beside
        )
        return self._transport.send(call, timeout)

    def timeline(self, *, before: int | None = None, limit: int = 100, timeout: Seconds = UNSET) -> Timeline:
        """What happened to the session in the last 30 days, the newest first, also once it is closed: at most `limit`
        entries, `before` the one of that id.
        """
        return self._transport.send(calls.timeline(self.id, before, limit), timeout)

    def norms(
        self,
        *,
        positions: Positions = "last",
        layers: Sequence[int] | None = None,
        vector: str | None = None,
        timeout: Seconds = UNSET,
    ) -> Norms:
        """How long the same residual streams are, and the cosine of each to a named vector."""
        return self._transport.send(breakpoint_calls.read_norms(self.id, positions, layers, vector), timeout)

    def attribution(
        self,
        tokens: tuple[int, int],
        *,
        positions: Positions = "last",
        neurons: int = 10,
        timeout: Seconds = UNSET,
    ) -> Attribution:
        """What each layer that `capture_at` has recorded, and each `attn_out` and `mlp_out`, adds to the logit of the
        first token less that of the second, at one position; so do heads where `z` is recorded, and so many `neurons`
        where `mlp_post` is. The last layer must be recorded.
        """
        call = breakpoint_calls.read_attribution(self.id, tokens, positions, neurons)
        return self._transport.send(call, timeout)

    def features(
        self,
        dictionary: str,
        *,
        positions: Positions = "last",
        top_k: int = 10,
        features: Sequence[int] | None = None,
        timeout: Seconds = UNSET,
    ) -> Features:
        """The `top_k` most active features of a dictionary at each position that `capture_at` has recorded at its
        point, or where the session is paused there, and the activations of the `features` given. At most 64 positions.
        """
        call = breakpoint_calls.read_features(self.id, dictionary, positions, top_k, features)
        return self._transport.send(call, timeout)

    def captures(self, *, point: str | None = None, layer: int | None = None, timeout: Seconds = UNSET) -> Captures:
        """What `capture_at` has recorded so far, at one point or in one layer if that is given."""
        return self._transport.send(breakpoint_calls.read_captures(self.id, point, layer), timeout)

    def clear_captures(self, *, timeout: Seconds = UNSET) -> None:
        """Forget what has been recorded."""
        self._transport.send(breakpoint_calls.clear_captures(self.id), timeout)
