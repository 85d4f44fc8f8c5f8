"""TransformerLens against a server: code that runs a `HookedTransformer` runs a model that others use meanwhile.

    from djinn.transformer_lens import HookedDjinn

    model = HookedDjinn("http://127.0.0.1:8000")
    logits, cache = model.run_with_cache("When John and Mary went to the shop, John gave a bottle to")
    cache["pattern", 5].shape  # [batch, head, query, key], as there
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.5.attn.hook_z", lambda z, hook: z * 0)])

Names and shapes are TransformerLens's, the cache is its own `ActivationCache`. Weights stay on the server, and so do
gradients: what needs them has no place here. Where the server has something else than TransformerLens, it has another
name: `attn_in`, `mlp_in` and `final_norm` are behind the norm's own weights, and `embed` has positions in it if the
model adds them.

A hook is any function of Python. The prompts pause where it belongs, the function runs here on what stands there, what
it returns is written back, and the prompts go on. A hook that `Edits` says in data needs no pause. A hook on a pattern,
or on another place where a pass cannot pause, only looks: it is called once the prompts are computed.

This needs `pip install djinn-client[numpy] transformer-lens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformer_lens import ActivationCache, HookedTransformerConfig

from client import Djinn
from client._sync.session import Session
from client.breakpoint_models import PointInfo
from client.edits import EditOptions
from client.errors import InvalidRequest

NAMES = {
    "resid_pre": "blocks.{}.hook_resid_pre",
    "q": "blocks.{}.attn.hook_q",
    "k": "blocks.{}.attn.hook_k",
    "v": "blocks.{}.attn.hook_v",
    "q_rot": "blocks.{}.attn.hook_rot_q",
    "k_rot": "blocks.{}.attn.hook_rot_k",
    "pattern": "blocks.{}.attn.hook_pattern",
    "z": "blocks.{}.attn.hook_z",
    "attn_out": "blocks.{}.hook_attn_out",
    "resid_mid": "blocks.{}.hook_resid_mid",
    "mlp_pre": "blocks.{}.mlp.hook_pre",
    "mlp_post": "blocks.{}.mlp.hook_post",
    "mlp_out": "blocks.{}.hook_mlp_out",
    "resid_post": "blocks.{}.hook_resid_post",
}
"""TransformerLens's names of the server's points; all others have the server's."""
WEIGHTS = ("blocks", "unembed", "W_E", "W_U", "b_U", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "ln_final")
WITHOUT_NAME = ("state", "logits")
"""Points that are in no cache: a state is of no position, and logits are what a run returns."""

Input = str | Sequence[str] | Sequence[int] | Tensor
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
Hook = Callable[..., Tensor | None]


class Site(NamedTuple):
    """A point in a layer, and what the server says of it."""

    info: PointInfo
    layer: int | None


@dataclass(frozen=True, slots=True)
class HookPoint:
    """What a hook is told of its place: TransformerLens's hooks read no more than this."""

    name: str
    at: int | None
    ctx: dict[str, Any]

    def layer(self) -> int:
        """The layer that the place is in."""
        if self.at is None:
            raise ValueError(f"{self.name} is in no layer")
        return self.at


class Edits:
    """A hook in data: the server makes these edits by itself, in the same pass. `Edits(scale=0.0, heads=[3])`."""

    def __init__(self, **options: Any) -> None:
        """As `EditOptions` has them."""
        self.options = cast("EditOptions", options)


class HookedDjinn:
    """The model of a server, as a `HookedTransformer` is used."""

    def __init__(self, server: str | Djinn | None = None, **options: Any) -> None:
        """`server` is its address or a client; `options` are those of `Djinn`."""
        self.client = server if isinstance(server, Djinn) else Djinn(server, **options)
        version, self._sites = self.client.version(), dict[str, Site]()
        infos = self.client.points()
        points = {info.name: info for info in infos}
        for info in infos:  # some points are there once for each width
            if info.name not in WITHOUT_NAME:
                for layer in info.layers or [None]:
                    name = NAMES.get(info.name, info.name if info.layers is None else f"blocks.{{}}.{info.name}")
                    self._sites[name.format(layer)] = Site(info, layer)
        q = points.get("q", points["resid_post"])
        heads, kv_heads = q.heads or 1, points.get("k", q).heads
        self.cfg = HookedTransformerConfig(
            n_layers=version.num_layers,
            d_model=version.hidden_size,
            n_ctx=version.max_model_len,
            n_heads=heads,
            n_key_value_heads=None if kv_heads == heads else kv_heads,
            d_head=q.width // heads,
            d_vocab=version.vocab_size,
            d_mlp=points["mlp_post"].width if "mlp_post" in points else None,
            model_name=version.model,
            act_fn="silu",
            device="cpu",
        )
        self._in_layers = {_key(site) for site in self._sites.values() if site.layer is not None}
        self._hooks: list[tuple[str, Hook | Edits]] = []

    @property
    def hook_names(self) -> list[str]:
        """The places that a cache has and hooks can be at, in the order of a pass."""
        return list(self._sites)

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool = True) -> Tensor:
        """Token ids `[batch, position]` of texts of one length; the tokenizer says whether there is a BOS."""
        texts = [text] if isinstance(text, str) else text
        rows = [self.client.tokenize(each, add_special_tokens=prepend_bos) for each in texts]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"texts of {sorted({len(row) for row in rows})} tokens: a batch here has no padding")
        return torch.tensor(rows)

    def to_string(self, tokens: Tensor | Sequence[int] | int) -> Any:
        """The text of tokens; for a batch `[batch, position]` a list with the text of each prompt."""
        found = torch.as_tensor(tokens)
        if found.dim() == 2:
            return [self.to_string(row) for row in found]
        return self.client.detokenize(found.reshape(-1).tolist())

    def to_str_tokens(self, text: Input, prepend_bos: bool = True) -> Any:
        """The text of each token of one prompt; for several texts a list for each."""
        if not isinstance(text, str) and isinstance(text, Sequence) and isinstance(text[0], str):
            return [self.to_str_tokens(str(each), prepend_bos) for each in text]
        [row] = self._rows(text, prepend_bos)
        return [self.to_string(token) for token in row]

    def to_single_str_token(self, token: int) -> str:
        """The text of a token."""
        return self.client.detokenize([token])

    def get_token_position(
        self, single_token: str | int, input: Input, mode: str = "first", prepend_bos: bool = True
    ) -> int:
        """The `first` or the `last` position of a token in one prompt. Raises ValueError if it is not there."""
        token = self.to_single_token(single_token) if isinstance(single_token, str) else single_token
        [row] = self._rows(input, prepend_bos)
        if mode not in ("first", "last") or token not in row:
            raise ValueError(f"mode must be first or last, and the token in the prompt: {mode!r}, {single_token!r}")
        return row.index(token) if mode == "first" else len(row) - 1 - row[::-1].index(token)

    def to_single_token(self, text: str) -> int:
        """The token that a text is. Raises ValueError if it is several."""
        found = self.client.tokenize(text, add_special_tokens=False)
        if len(found) != 1:
            raise ValueError(f"{text!r} is {len(found)} tokens")
        return found[0]

    def __call__(self, input: Input, return_type: str | None = "logits", **options: Any) -> Any:
        """Run the prompts; `return_type` is `logits`, `loss`, `both` or None."""
        return self.run_with_hooks(input, return_type=return_type, **options)

    def run_with_cache(
        self,
        input: Input,
        *,
        names_filter: NamesFilter = None,
        return_type: str | None = "logits",
        remove_batch_dim: bool = False,
        prepend_bos: bool = True,
        loss_per_token: bool = False,
        **options: Any,
    ) -> tuple[Any, ActivationCache]:
        """What the prompts give, and what they have at the places that `names_filter` chooses (None: at all).

        Without hooks that is one request, if all layers have the same points. With hooks the prompts run as in
        `run_with_hooks`, and are captured.
        """
        _refuse(options)
        rows, names = self._rows(input, prepend_bos), self._chosen(names_filter)
        if self._hooks:
            logits, found = self._run(rows, self._hooks, names, return_type is not None)
        else:
            logits, found = self._read(rows, names, return_type is not None)
        cache = ActivationCache(found, self)
        returned = _returned(logits, rows, return_type, loss_per_token)
        return returned, cache.remove_batch_dim() if remove_batch_dim else cache

    def run_with_hooks(
        self,
        input: Input,
        *,
        fwd_hooks: Sequence[tuple[NamesFilter, Hook | Edits]] = (),
        return_type: str | None = "logits",
        prepend_bos: bool = True,
        loss_per_token: bool = False,
        **options: Any,
    ) -> Any:
        """What the prompts give where these hooks change them; see this module."""
        _refuse(options)
        rows = self._rows(input, prepend_bos)
        with self.hooks(fwd_hooks):
            if self._hooks:
                logits, _ = self._run(rows, self._hooks, [], return_type is not None)
            else:
                logits, _ = self._read(rows, [], return_type is not None)
        return _returned(logits, rows, return_type, loss_per_token)

    @contextmanager
    def hooks(self, fwd_hooks: Sequence[tuple[NamesFilter, Hook | Edits]] = ()) -> Iterator[HookedDjinn]:
        """Have these hooks in a block."""
        before = list(self._hooks)
        try:
            for names, hook in fwd_hooks:
                self.add_hook(names, hook)
            yield self
        finally:
            self._hooks = before

    def add_hook(self, name: NamesFilter, hook: Hook | Edits) -> None:
        """Have a hook from now on, until `reset_hooks`."""
        self._hooks += [(each, hook) for each in self._chosen(name)]

    def reset_hooks(self, **_options: Any) -> None:
        """Remove all hooks. The options of TransformerLens have no effect."""
        self._hooks.clear()

    def eval(self) -> HookedDjinn:
        """The model itself: a server does not train it."""
        return self

    def to(self, *_place: Any) -> HookedDjinn:
        """The model itself: it stays on the server, and its results are on the CPU."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for weights it says what to use instead."""
        instead = "direct logit attribution is session.attribution" if name in WEIGHTS else "see its documentation"
        kept = "weights stay on the server" if name in WEIGHTS else "a server does not offer it"
        raise AttributeError(f"HookedDjinn has no {name}: {kept}; {instead}")

    def _chosen(self, names: NamesFilter) -> list[str]:
        if names is None:
            return self.hook_names
        if callable(names):
            return [each for each in self.hook_names if names(each)]
        chosen = [names] if isinstance(names, str) else list(names)
        unknown = [each for each in chosen if each not in self._sites]
        if unknown:
            raise InvalidRequest(f"the model has no place {unknown[0]!r}: hook_names has all")
        return chosen

    def _rows(self, input: Input, prepend_bos: bool) -> list[list[int]]:
        """Token ids of each prompt, all of one length."""
        if isinstance(input, str) or (isinstance(input, Sequence) and isinstance(input[0], str)):
            input = self.to_tokens(cast("str | Sequence[str]", input), prepend_bos)
        rows: list[list[int]] = torch.atleast_2d(torch.as_tensor(input)).tolist()
        return rows

    def _read(
        self, rows: list[list[int]], names: Sequence[str], wants_logits: bool
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """One request for all points that are read at the same layers: mostly one in all."""
        sent = {name: self._sites[name] for name in names}
        layers = {("logits", 0): list[int]()} if wants_logits else {}
        for site in sent.values():
            layers.setdefault((site.info.name, site.info.width), []).extend([] if site.layer is None else [site.layer])
        alike = dict[tuple[int, ...], list[str]]()
        for (point, _), some in layers.items():
            alike.setdefault(tuple(sorted(some)), []).append(point)
        read = dict[tuple[str, int | None], Tensor]()
        for alike_layers, points in alike.items():
            found = self.client.activations(rows, points=points, layers=alike_layers or None)
            for point in points:
                stacked = torch.from_numpy(np.stack([found.tensors[f"{index}.{point}"] for index in range(len(rows))]))
                read |= {(point, layer): stacked[:, place] for place, layer in enumerate(alike_layers or (None,))}
        cached = {name: _shaped(read[_key(site)], site.info.name) for name, site in sent.items()}
        return read.get(("logits", None)), cached

    def _run(
        self, rows: list[list[int]], hooks: Sequence[tuple[str, Hook | Edits]], names: Sequence[str], wants_logits: bool
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """A session for each prompt. All pause in the same places, so a hook has the whole batch there."""
        pausing, looking = dict[tuple[str, int | None], list[tuple[str, Hook]]](), list[tuple[str, Hook]]()
        ctx: dict[str, dict[str, Any]] = {name: {} for name, _ in hooks}
        with ExitStack() as opened:
            sessions = [opened.enter_context(self.client.sessions.create()) for _ in rows]
            for name, hook in hooks:
                site = self._sites[name]
                if isinstance(hook, Edits):
                    for session in sessions:
                        session.steer(**_at(site), **hook.options)
                elif site.info.no_pause is not None:
                    looking.append((name, hook))
                else:
                    pausing.setdefault((site.info.name, site.layer), []).append((name, hook))
            for name, _ in {key: value[0] for key, value in pausing.items()}.values():
                for session in sessions:
                    session.break_at(**_at(self._sites[name]), when_pass="prefill")
            kept = dict.fromkeys([*names, *(name for name, _ in looking)])
            for session in sessions:
                for name in kept:
                    session.capture_at(**_at(self._sites[name]), when_pass="prefill")
                if wants_logits:
                    session.capture_at(point="logits", when_pass="prefill")
            turns = [session.generate(token_ids=row, max_tokens=0) for session, row in zip(sessions, rows, strict=True)]
            while turns[0].status == "paused":
                self._call_hooks(sessions, len(rows[0]), pausing, ctx)
                turns = [session.resume() for session in sessions]
            seen = [self._captured(session) for session in sessions]
        found = {
            name: _shaped(torch.stack([each[_key(self._sites[name])] for each in seen]), self._sites[name].info.name)
            for name in kept
        }
        for name, hook in looking:
            if hook(found[name].clone(), hook=HookPoint(name, self._sites[name].layer, ctx[name])) is not None:
                raise InvalidRequest(f"a hook at {name} can only look: {self._sites[name].info.no_pause}")
        logits = torch.stack([each["logits", None] for each in seen]) if wants_logits else None
        return logits, {name: found[name] for name in names}

    def _call_hooks(
        self,
        sessions: Sequence[Session],
        length: int,
        pausing: Mapping[tuple[str, int | None], Sequence[tuple[str, Hook]]],
        ctx: Mapping[str, dict[str, Any]],
    ) -> None:
        """Run the hooks of the place where all sessions are paused, and write back what they have changed."""
        places = [session.checkpoint() for session in sessions]
        first = places[0]
        if (first.first, first.end) != (0, length):
            raise InvalidRequest(
                f"the server computes prompts that may pause in parts of {first.end - first.first} tokens, so a hook "
                f"would not see all {length}: send shorter ones, or raise its --max-step-tokens"
            )
        here = first.info.point, first.info.layer
        called = pausing[here] if here in pausing else pausing[here[0], None]
        info = self._sites[called[0][0]].info
        before = torch.from_numpy(np.stack([place.read() for place in places]))
        values = _shaped(_split(before, info), info.name).clone()
        for name, hook in called:
            found = hook(values, hook=HookPoint(name, self._sites[name].layer, ctx[name]))
            values = values if found is None else found
        after = values.reshape(before.shape).to(before.dtype)
        for place, row, was in zip(places, after, before, strict=True):
            if not torch.equal(row, was):
                place.write(row.detach().numpy())

    def _captured(self, session: Session) -> dict[tuple[str, int | None], Tensor]:
        """What a session's prompt has at each place, `[position, ...]`; it may have been computed in parts."""
        parts = dict[tuple[str, int | None], list[Any]]()
        for each in session.captures().records:
            in_layer = (each.point, each.layer) in self._in_layers
            parts.setdefault((each.point, each.layer if in_layer else None), []).append(each.activation)
        return {key: torch.from_numpy(_joined(found)) for key, found in parts.items()}


def _joined(parts: Sequence[Any]) -> Any:
    """Parts of a prompt one behind the other. Later parts of a pattern have more keys."""
    keys = max(each.shape[-1] for each in parts)
    return np.concatenate([np.pad(p, [*[(0, 0)] * (p.ndim - 1), (0, keys - p.shape[-1])]) for p in parts])


def _key(site: Site) -> tuple[str, int | None]:
    return site.info.name, site.layer


def _at(site: Site) -> dict[str, Any]:
    """The place as the calls of a session take it."""
    return {"point": site.info.name} | ({} if site.layer is None else {"layer": site.layer})


def _split(flat: Tensor, info: PointInfo) -> Tensor:
    """`[batch, position, width]` with the heads apart, where there are some."""
    return flat if info.heads is None else flat.unflatten(-1, (info.heads, -1))


def _shaped(found: Tensor, point: str) -> Tensor:
    """As TransformerLens has it: a pattern is `[batch, head, query, key]`."""
    return found.transpose(1, 2) if point == "pattern" else found


def _refuse(options: Mapping[str, Any]) -> None:
    """Options that change nothing here pass; others would be ignored."""
    known = {"reset_hooks_end": True, "clear_contexts": False, "padding_side": None, "device": None, "incl_bwd": False}
    for name, value in options.items():
        if name not in known or value not in (known[name], None):
            raise InvalidRequest(f"{name}={value!r} does nothing against a server")


def _returned(
    logits: Tensor | None, rows: Sequence[Sequence[int]], return_type: str | None, loss_per_token: bool
) -> Any:
    if return_type is None or logits is None:
        return None
    if return_type == "logits":
        return logits
    if return_type not in ("loss", "both"):
        raise InvalidRequest(f"return_type must be logits, loss, both or None, not {return_type!r}")
    wanted = torch.tensor(rows)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), wanted.flatten(), reduction="none")
    loss = loss.view(wanted.shape) if loss_per_token else loss.mean()
    return (logits, loss) if return_type == "both" else loss
