"""Every setting of the server in one place: the only reader of the environment (`DJINN_*`)."""

from app.settings.settings import DRAFT_TOKENS, EngineSettings, Settings, variables

__all__ = ["DRAFT_TOKENS", "EngineSettings", "Settings", "variables"]
