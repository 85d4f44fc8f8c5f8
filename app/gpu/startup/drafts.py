"""Whether drafts change no token of a model, and how long they may be."""

import logging

import torch

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.attention import tokens_alike
from app.gpu.kernels.linear import sums_rows_alike
from app.gpu.models import why_not_row_by_row
from app.model_store.resolve import ResolvedModel
from app.settings import DRAFT_TOKENS, EngineSettings

logger = logging.getLogger(__name__)


def choose_draft_tokens(model: ResolvedModel, settings: EngineSettings, device: torch.device) -> int:
    """Most drafted tokens of one row; 0: none. Raises FieldOutOfRange if drafts are asked for where they could change a
    token.
    """
    asked = settings.max_draft_tokens
    if asked == 0:
        return 0
    reason = _why_not(model, settings, device)
    if asked is not None and reason is not None:
        raise FieldOutOfRange(
            f"max_draft_tokens must be 0: drafts could change tokens, as {reason}", param="max_draft_tokens"
        )
    if asked is None and reason is None and device.type != "cpu":
        reason = f"on {device} they cost the overlap of steps and CUDA graphs; max_draft_tokens turns them on"
    if reason is not None:
        logger.info("drafts: none, as %s", reason)
        return 0
    return DRAFT_TOKENS if asked is None else asked


def _why_not(model: ResolvedModel, settings: EngineSettings, device: torch.device) -> str | None:
    """Why a token's bits could depend on the tokens beside it; None: they do not."""
    reason = why_not_row_by_row(model, device)
    if reason is not None:
        return reason
    if not sums_rows_alike(device, batch_invariant=settings.batch_invariant):
        return "matrix products depend on the batch; with batch_invariant they do not"
    if tokens_alike(device, batch_invariant=settings.batch_invariant) <= DRAFT_TOKENS:
        return "attention depends on the batch; with batch_invariant it does not"
    return None
