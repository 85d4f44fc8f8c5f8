"""What clients upload to look inside the model: vectors, dictionaries, lenses and probes. No third-party imports.

A vector is numbers and nothing else. Of the others this says what they are; their numbers are in a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.domain.breakpoints import TensorData
from app.domain.points import Point


class UploadKind(StrEnum):
    """Each owner has names of their own for each kind."""

    VECTOR = "vector"
    DICTIONARY = "dictionary"
    LENS = "lens"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class UploadKey:
    """An owner's upload of that kind and name. `owner` is the tenant's name (None: there are no keys)."""

    owner: str | None
    kind: UploadKind
    name: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file of an upload: SHA-256 over its bytes, in hexadecimal digits, and how many there are."""

    digest: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Dictionary:
    """A sparse autoencoder or a transcoder (Bricken et al., *Towards Monosemanticity*, 2023). Of `x` `[width]` at
    `point` of `layer`, feature i has the activation `a = relu(scale * z + bias)` if `z + gate > threshold`, else 0,
    where `z = x . encoder[i]`; with `k`, only the k largest of them are not 0. `decoder[i]` is what it adds to the
    point `writes`, per unit of its activation.

    The file has `encoder` `[features, width]`, `decoder` `[features, writes_width]`, and `scale`, `bias`, `gate` and
    `threshold` `[features]` each, all in float32. What the uploaded format does to its input is folded into them.
    """

    file: StoredFile
    architecture: str
    layer: int
    point: Point
    width: int
    features: int
    writes: Point
    """Of the same layer: `point`, but for transcoders."""
    k: int | None = None
    neuronpedia_id: str | None = None


class LensKind(StrEnum):
    """What a lens makes of the residual stream `h` after a layer, before the final norm and the head."""

    TUNED = "tuned"
    """`h + W h + b` (Belrose et al., arXiv:2303.08112)"""
    JACOBIAN = "jacobian"
    """`W h + b`, where `W` is what the layers above do to small changes of `h`, on average"""


@dataclass(frozen=True, slots=True)
class Translators:
    """A lens: for each of `layers` a matrix and, if it has one, a bias. The file has `{layer}.weight` `[hidden_size,
    hidden_size]` and `{layer}.bias` `[hidden_size]`, in float32.
    """

    file: StoredFile
    lens: LensKind
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredProbe:
    """A probe of `x` `[width]` at `point` of `layer`: `weight . x + bias`, or with `hidden` neurons `weight2 .
    relu(weight x + bias) + bias2`; with `sigmoid` the logistic function of that. The file has `weights`, all of these
    numbers, one behind the other, in float32.
    """

    file: StoredFile
    layer: int
    point: Point
    width: int
    hidden: int
    sigmoid: bool


Uploaded = Dictionary | Translators | StoredProbe
"""What has a file."""
Upload = TensorData | Uploaded
