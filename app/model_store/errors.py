"""Why a model could not be made ready. The operator sees these at `djinn serve` and `djinn models`.

ModelStoreError
├── DownloadFailed     no network, no such file there, or no permission
├── ChecksumMismatch   what arrived is not what was asked for
├── ConversionFailed   a GGUF file that cannot be converted faithfully
├── BrokenModel        a folder that Transformers cannot read
└── StoreFull          not enough disk space
"""

from app.domain.errors import DjinnError


class ModelStoreError(DjinnError):
    code = "model_unavailable"


class DownloadFailed(ModelStoreError):
    pass


class ChecksumMismatch(ModelStoreError):
    pass


class ConversionFailed(ModelStoreError):
    pass


class BrokenModel(ModelStoreError):
    pass


class StoreFull(ModelStoreError):
    pass
