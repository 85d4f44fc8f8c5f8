"""Dictionaries: the formats that clients upload, and what is said of those that are kept.

Read are the folders of SAELens, `cfg.json` with safetensors (github.com/decoderesearch/SAELens), and `params.npz` of
Gemma Scope (Lieberum et al., arXiv:2408.05147). Nothing that is read is executed, and all of it is checked.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field

from app.domain.activations import MAX_MAP_POSITIONS, ActivationMap, Dictionary, FeatureRows, StoredFile
from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.domain.points import Point
from app.domain.values import ModelInfo
from app.text.tokenizer import Tokens
from app.wire.base import MAX_COUNT, WireModel, list_shape
from app.wire.checkpoint import ActivationQuery, PositionsText
from app.wire.edits import VECTOR_NAME
from app.wire.maps import LayersText
from app.wire.points import as_number, find_place
from app.wire.tensors import check_array, read_arrays
from app.wire.turns import FeatureActivation

Floats = NDArray[np.float32]
CONFIG, WEIGHTS = "cfg", "weights"
"""The parts of the form that are files."""
MAX_FEATURES = 1 << 24
RELU, JUMPRELU, TOPK, GATED = "standard", "jumprelu", "topk", "gated"
KINDS = {
    **dict.fromkeys(("standard", "transcoder", "skip_transcoder"), RELU),
    **dict.fromkeys(("jumprelu", "batchtopk", "matryoshka_batchtopk"), JUMPRELU),
    **dict.fromkeys(("jumprelu_transcoder", "jumprelu_skip_transcoder"), JUMPRELU),
    TOPK: TOPK,
    GATED: GATED,
}
"""What each architecture of SAELens computes. Of a BatchTopK SAE is saved what it is at inference: a JumpReLU."""
TENSORS = {
    RELU: ("b_enc",),
    TOPK: ("b_enc",),
    JUMPRELU: ("b_enc", "threshold"),
    GATED: ("b_gate", "b_mag", "r_mag"),
}
"""Beside `W_enc` `[width, features]`, `W_dec` `[features, width]` and `b_dec`: those `[features]`."""
DONE_BY_US = ("none", "expected_average_only_in")
"""Values of `normalize_activations` that change nothing at inference, as SAELens has it."""


class DictionaryFields(WireModel):
    """The fields of the form beside the files."""

    name: str = Field(pattern=VECTOR_NAME)
    layer: Annotated[int | None, BeforeValidator(as_number)] = Field(
        None, ge=0, le=MAX_COUNT, description="where cfg.json names no hook"
    )
    point: str | None = Field(None, max_length=100, description="where cfg.json names no hook (default: resid_post)")
    neuronpedia_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_./-]{1,200}$", description="such as gpt2-small/6-res-jb, unless cfg.json has one"
    )


class DictionaryView(BaseModel):
    """A dictionary of `features` features, read at `point` of `layer`. `url` is where Neuronpedia shows one of them,
    with `{feature}` in the place of its index; null: it is not known there.
    """

    name: str
    architecture: str
    layer: int
    point: Point
    writes: Point = Field(description="the point that its decoder writes to: another one than `point` in transcoders")
    width: int
    features: int
    k: int | None = Field(description="of TopK: how many features are active at most")
    bytes: int
    loaded: bool = Field(description="false: the device's memory for uploads was full when the server started")
    url: str | None

    @classmethod
    def of(cls, name: str, found: Dictionary, *, loaded: bool) -> Self:
        """The wire form of a dictionary of that name."""
        return cls(**asdict(found), name=name, bytes=found.file.bytes, loaded=loaded, url=page_of(found))


DictionaryList = list_shape("DictionaryList", "The caller's dictionaries by name.", DictionaryView)


def read_dictionary(
    weights: Path, asked: DictionaryFields, info: ModelInfo, config: bytes | None, *, room: int
) -> tuple[Callable[[StoredFile], Dictionary], dict[str, Floats]]:
    """What is known of the dictionary but for the file that it will have, and the tensors of that, as `Dictionary` has
    them. A file of more than `room` bytes of numbers is not read.

    Raises `MalformedRequest` for files that are none, `FieldOutOfRange`, which names the field or the tensor.
    """
    said = _Config.of(config, asked, info)
    arrays = _read_npz(weights, room) if zipfile.is_zipfile(weights) else read_arrays(weights, param=WEIGHTS)
    kind = said.kind if config is not None else JUMPRELU if "threshold" in arrays else RELU
    width, features = _shape(arrays, said)
    shapes = {"W_enc": (width, features), **dict.fromkeys(TENSORS[kind], (features,))}
    shapes |= {"W_dec": (features, said.out_width), "b_dec": (said.out_width,)}
    found = {name: _tensor(arrays, name, shape) for name, shape in shapes.items()}
    encoder, decoder = np.ascontiguousarray(found.pop("W_enc").T), found.pop("W_dec")
    shift: Any = 0.0
    if said.subtracts_bias:  # (x - b_dec) W_enc = x W_enc - b_dec W_enc
        shift = -(encoder.astype(np.float64) @ found["b_dec"].astype(np.float64))
    if said.centers:  # the stream without its mean: so is the product with an encoder without its own
        encoder -= encoder.mean(axis=1, keepdims=True)
    ones, zeros = np.ones(features, np.float32), np.zeros(features, np.float32)
    if kind == GATED:
        with np.errstate(over="ignore", invalid="ignore"):  # what is infinite is refused below
            scale = np.exp(found["r_mag"].astype(np.float64))
            rule = {"scale": scale, "bias": found["b_mag"] + shift * scale, "gate": found["b_gate"] + shift}
    else:
        bias = found["b_enc"] + shift
        rule = {"scale": ones, "bias": bias, "gate": bias}
    rule["threshold"] = found.get("threshold", zeros)
    if said.by_decoder_norm:  # activations are measured by how much they write
        lengths = np.maximum(np.linalg.norm(decoder.astype(np.float64), axis=1), 1e-8)
        rule |= {"scale": rule["scale"] * lengths, "bias": rule["bias"] * lengths}
        decoder = decoder / lengths[:, None]
    tensors = {"encoder": encoder, "decoder": decoder, **rule}

    def make(file: StoredFile) -> Dictionary:
        return Dictionary(
            file,
            said.architecture if config is not None else kind,
            said.layer,
            said.point,
            width,
            features,
            said.writes,
            said.k if kind == TOPK else None,
            asked.neuronpedia_id or said.neuronpedia_id,
        )

    with np.errstate(over="ignore"):
        rounded = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    for name, tensor in rounded.items():
        if not np.isfinite(tensor).all():
            raise FieldOutOfRange.at(WEIGHTS, f"folded together, the numbers of {name} are beyond the range of float32")
    return make, rounded


class _Config:
    """What `cfg.json` says, in any of SAELens' versions. New ones have what it was trained on below `metadata`."""

    @classmethod
    def of(cls, content: bytes | None, asked: DictionaryFields, info: ModelInfo) -> Self:
        """Checked against the model. Raises `MalformedRequest`, `FieldOutOfRange`."""
        fields: Any = {}
        if content is not None:
            try:
                fields = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise MalformedRequest.at(CONFIG, "it is not JSON") from error
            if not isinstance(fields, dict):
                raise FieldOutOfRange.at(CONFIG, "it must be an object, as SAELens writes it")
        about = fields.get("metadata")
        return cls({**fields, **(about if isinstance(about, dict) else {})}, asked, info)

    def __init__(self, fields: Mapping[str, Any], asked: DictionaryFields, info: ModelInfo) -> None:
        self.architecture = _text(fields, "architecture") or RELU
        activation, keywords = fields.get("activation_fn_str", "relu"), fields.get("activation_fn_kwargs") or {}
        if self.architecture == RELU and activation == TOPK:  # as older versions say it
            self.architecture, fields = TOPK, {"k": isinstance(keywords, dict) and keywords.get("k"), **fields}
        elif activation not in ("relu", TOPK):
            raise _refused("activation_fn_str", activation, "relu or topk")
        if self.architecture not in KINDS:
            raise _refused("architecture", self.architecture, ", ".join(KINDS))
        self.kind = KINDS[self.architecture]
        if (norm := fields.get("normalize_activations") or "none") not in DONE_BY_US:
            raise _refused("normalize_activations", norm, " or ".join(DONE_BY_US))
        if fields.get("finetuning_scaling_factor"):
            raise _refused("finetuning_scaling_factor", True, "false: fold the factor into W_dec")
        is_transcoder = self.architecture.endswith("transcoder")
        self.k = _count(fields, "k", MAX_FEATURES) if self.kind == TOPK else None
        self.subtracts_bias = bool(fields.get("apply_b_dec_to_input", bool(fields))) and not is_transcoder
        self.by_decoder_norm = bool(fields.get("rescale_acts_by_decoder_norm")) and self.kind == TOPK
        loading = fields.get("model_from_pretrained_kwargs")
        self.centers = isinstance(loading, dict) and bool(loading.get("center_writing_weights"))
        self.width = _count(fields, "d_in", MAX_COUNT) if "d_in" in fields else None
        self.features = _count(fields, "d_sae", MAX_FEATURES) if "d_sae" in fields else None
        self.neuronpedia_id = _text(fields, "neuronpedia_id")
        hook = _text(fields, "hook_name") or _text(fields, "hook_point")
        place = written = find_place(info, hook, asked.layer, asked.point)
        self.layer, self.point = place.layers[0], place.point
        if is_transcoder and (out := _text(fields, "hook_name_out")) is not None:
            written = find_place(info, out, asked.layer, None)
            if written.layers != place.layers:
                raise _refused("hook_name_out", out, f"a point of layer {self.layer}, which the transcoder reads")
        self.writes, wanted = written.point, place.shapes[0].width
        if self.width is not None and self.width != wanted:
            raise _refused("d_in", self.width, f"{wanted}, the width of {self.point}")
        self.width, self.out_width = wanted, written.shapes[0].width


def _shape(arrays: Mapping[str, Floats], said: _Config) -> tuple[int, int]:
    """The width and the number of features."""
    if "W_enc" not in arrays:
        raise _missing("W_enc", arrays)
    assert said.width is not None
    shape = arrays["W_enc"].shape
    features = said.features or (shape[1] if len(shape) == 2 else 0)
    if not 0 < features <= MAX_FEATURES:
        raise FieldOutOfRange.at("weights.W_enc", f"{features} features must be from 1 to {MAX_FEATURES}")
    if said.k is not None and said.k > features:
        raise FieldOutOfRange.at("cfg.k", f"{said.k} must be from 1 to {features}, the features")
    return said.width, features


def _tensor(arrays: Mapping[str, Floats], name: str, shape: tuple[int, ...]) -> Floats:
    param = f"{WEIGHTS}.{name}"
    if name not in arrays:
        raise _missing(name, arrays)
    found = arrays[name]
    if name == "threshold" and found.shape == ():
        found = np.full(shape, found, np.float32)  # BatchTopK has one for all
    check_array(found, shape, param=param)
    return found


def _missing(name: str, arrays: Mapping[str, Floats]) -> FieldOutOfRange:
    param = f"{WEIGHTS}.{name}"
    return FieldOutOfRange(f"{param}: missing; there are {', '.join(sorted(arrays)[:10])}"[:500], param=param)


def _read_npz(path: Path, room: int) -> dict[str, Floats]:
    """The arrays of `params.npz`, of which none is a Python object."""
    try:
        with zipfile.ZipFile(path) as packed:
            needed = sum(each.file_size for each in packed.infolist())
        if needed <= room:
            with np.load(path, allow_pickle=False) as stored:
                found = {name: stored[name] for name in stored.files}
    except Exception as error:  # there is hardly one that zipfile and numpy do not raise for a crafted file
        raise MalformedRequest.at(WEIGHTS, "the file is not one of numpy's, or not whole") from error
    if needed > room:
        raise FieldOutOfRange.at(WEIGHTS, f"{needed} bytes, and there is room for {room}")
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # a file of another kind in the archive
            raise FieldOutOfRange.at(f"weights.{name[:100]}", "it must be an array")
        if array.dtype.kind != "f":
            raise FieldOutOfRange.at(f"weights.{name}", f"{array.dtype} must be a float type")
    return {name: array.astype(np.float32, copy=False) for name, array in found.items()}


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= 200):
        raise _refused(name, value, "text of at most 200 characters")
    return value or None


def _count(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise _refused(name, value, f"a number from 1 to {most}")
    return value


def _refused(field: str, value: object, wanted: str) -> FieldOutOfRange:
    return FieldOutOfRange.at(f"cfg.{field}", f"{str(value)[:100]} must be {wanted}")


MAX_CHOSEN = 64


class FeaturesQuery(ActivationQuery):
    """Which positions, and what to tell of each."""

    dictionary: str = Field(pattern=VECTOR_NAME, description="name of an uploaded dictionary")
    positions: PositionsText = Field(
        "last",
        description="last: the last position that is kept; all: all that are; first:end, positions in the session's "
        f"history; at most {MAX_MAP_POSITIONS}",
    )
    top_k: int = Field(10, ge=0, le=100, description="features to report for each position, as far as they are active")
    features: LayersText | None = Field(
        None, description=f"such as 3,7,11 or first:end: at most {MAX_CHOSEN} features whose activations to report too"
    )

    def to_features(self, found: Dictionary) -> tuple[int, ...]:
        """`features` in the engine's form. Raises `FieldOutOfRange` for one that the dictionary does not have."""
        if self.features is None:
            return ()
        first, colon, end = self.features.partition(":")
        chosen = range(int(first), int(end)) if colon else tuple(map(int, self.features.split(",")))
        if len(chosen) > MAX_CHOSEN:
            raise FieldOutOfRange.at("features", f"at most {MAX_CHOSEN}, not {len(chosen)}")
        if max(chosen) >= found.features:
            wrong = f"features: {max(chosen)} must be from 0 to {found.features - 1}, those of the dictionary"
            raise FieldOutOfRange(wrong, param="features")
        return tuple(chosen)


class FeaturesPosition(BaseModel):
    """The features of the stream at a position where `token_id` stands: the most active ones, most first, and those
    that were asked for, in their order.
    """

    position: int
    token_id: int
    text: str
    top: list[FeatureActivation]
    chosen: list[FeatureActivation]


class FeaturesView(BaseModel):
    """What a dictionary makes of a session at `point` of `layer`, position by position: those that are kept.

    `[kept_first, kept_end)` are all positions for which the server keeps the stream there. `url` is where Neuronpedia
    shows a feature, with `{feature}` in the place of its index; null: it is not known there.
    """

    dictionary: str
    layer: int
    point: Point
    kept_first: int
    kept_end: int
    positions: list[FeaturesPosition]
    url: str | None

    @classmethod
    def of(
        cls,
        name: str,
        found: Dictionary,
        chosen: tuple[int, ...],
        kept: ActivationMap,
        read: FeatureRows,
        tokens: Tokens,
    ) -> Self:
        """The wire form of what was `read` of what is `kept`."""
        at = [position for each in kept.layers for position in each.positions]
        positions = []
        for position, top, values in zip(at, read.rows, read.chosen, strict=True):
            token_id = kept.token_ids[position - kept.first]
            positions.append(
                FeaturesPosition(
                    position=position,
                    token_id=token_id,
                    text=tokens.token_text(token_id),
                    top=[FeatureActivation(index=index, activation=value) for index, value in top],
                    chosen=[FeatureActivation(index=i, activation=v) for i, v in zip(chosen, values, strict=True)],
                )
            )
        return cls(
            dictionary=name,
            layer=found.layer,
            point=found.point,
            kept_first=kept.kept_first,
            kept_end=kept.kept_end,
            positions=positions,
            url=page_of(found),
        )


def page_of(found: Dictionary) -> str | None:
    """Where Neuronpedia shows a feature of the dictionary, with `{feature}` in the place of its index."""
    return found.neuronpedia_id and f"https://www.neuronpedia.org/{found.neuronpedia_id}/{{feature}}"
