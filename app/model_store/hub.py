"""Models from the Hugging Face hub, kept in the hub client's own cache."""

from pathlib import Path

from app.domain.errors import UnknownModel
from app.model_store.errors import DownloadFailed

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def download_from_hub(repo_id: str) -> Path:
    """The local snapshot of `repo_id` (`org/name`), fetched if need be; HF_HUB_OFFLINE and HF_TOKEN apply.

    Raises UnknownModel if the hub has no such model, DownloadFailed if it cannot be reached or refuses.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_FILES)))
    except GatedRepoError as error:
        raise DownloadFailed(f"{repo_id} asks for permission: accept its terms and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModel(f"the Hugging Face hub has no model {repo_id}", param="model") from error
    except OSError as error:
        raise DownloadFailed(f"{repo_id} is not in the local cache, and its download failed: {error}") from error
