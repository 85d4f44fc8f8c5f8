"""Every setting of the server in one place: the only reader of the environment (`DJINN_*`)."""

from app.settings.engine import DRAFT_TOKENS, EngineSettings
from app.settings.settings import Settings, variables

__all__ = ["DRAFT_TOKENS", "EngineSettings", "Settings", "variables"]
