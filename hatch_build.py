"""A wheel of djinn-server needs djinn-client of the same version: only that wheel has `client` and `djinn`.

An editable installation has both packages from the checkout, and needs no second distribution.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SameClient(BuildHookInterface[Any]):
    """Adds the dependency."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is the kind of wheel: "standard" or "editable"."""
        if version == "standard":
            build_data["dependencies"].append(f"djinn-client=={self.metadata.version}")
