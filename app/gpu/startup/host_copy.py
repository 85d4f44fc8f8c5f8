"""The host's copy of a model's weights: a file on a CPU, whose device is host memory itself, pinned memory on a GPU."""

from pathlib import Path

import torch

from app.gpu.device.dtypes import dtype_name
from app.gpu.device.streams import DeviceStreams
from app.gpu.kernels.attention.base import Attention
from app.gpu.kernels.linear.base import MakeLinear
from app.gpu.models import build_stack
from app.gpu.startup.survey import Survey
from app.gpu.weights.conversion import open_bundle_file
from app.gpu.weights.fill import FillText, Writer
from app.gpu.weights.header import BundleContents
from app.gpu.weights.pinned_store import PinnedStore
from app.gpu.weights.source import weights_of
from app.gpu.weights.store import BundleStore
from app.model_store.fingerprint import fingerprint
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings


def make_host_copy(
    model: ResolvedModel,
    found: Survey,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    linear: MakeLinear,
    attention: Attention,
    streams: DeviceStreams,
) -> BundleStore:
    """All bundles and tables that `found` lists. Raises BrokenModel, StoreFull and FieldOutOfRange."""
    # Random weights are made where that is fast; stored ones are on the host to begin with.
    origin = device if model.folder is None else torch.device("cpu")

    def fill(writer: Writer) -> None:
        text = FillText(writer, dtype, linear)
        build_stack(model, weights_of(model, origin, dtype), text, attention, settings.max_model_len)

    if device.type == "cpu":
        from app.gpu.weights.file_store import FileStore  # imports Numba, which only a CPU needs

        contents = BundleContents(fingerprint(model), dtype, found.layouts, found.tables)
        path = settings.weights_dir / _file_name(model, contents)
        return FileStore(open_bundle_file(path, contents, fill), settings.chunk_bytes)
    store = PinnedStore(found.layouts, found.tables, streams, settings.chunk_bytes)
    fill(store)
    return store


def _file_name(model: ResolvedModel, contents: BundleContents) -> str:
    """One for each model and dtype."""
    return f"{Path(model.name).name}-{contents.fingerprint[:16]}-{dtype_name(contents.dtype)}.safetensors"
