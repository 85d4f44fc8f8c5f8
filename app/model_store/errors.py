"""Why a model could not be made ready. The operator sees these at `djinn serve` and `djinn models`."""

from app.domain.errors import DjinnError


class ModelStoreError(DjinnError, code="model_unavailable"):
    """The model could not be made ready."""


class DownloadFailed(ModelStoreError):
    """No network, no such file there, or no permission."""


class ChecksumMismatch(ModelStoreError):
    """What arrived is not what was asked for."""


class ConversionFailed(ModelStoreError):
    """A GGUF file that cannot be converted faithfully."""


class BrokenModel(ModelStoreError):
    """A folder that Transformers cannot read."""


class StoreFull(ModelStoreError):
    """Not enough disk space."""
