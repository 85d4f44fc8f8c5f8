"""The served models as Anthropic's API lists it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from app.domain.values import ModelInfo


def model_info(info: ModelInfo, loaded_at: int) -> dict[str, Any]:
    """The model, which the server loaded at `loaded_at`, in Unix seconds."""
    return {
        "type": "model",
        "id": info.name,
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(loaded_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": info.max_model_len,
        "lifecycle": "active",
    }


def list_of_models(models: Sequence[tuple[ModelInfo, int]]) -> dict[str, Any]:
    """The only page of the list, of models and when each was loaded."""
    data = [model_info(*each) for each in models]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
