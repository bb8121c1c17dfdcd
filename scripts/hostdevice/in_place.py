"""An editable install copies no files: those that are forced into the wheel are kvpatch's."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class InPlace(BuildHookInterface):  # type: ignore[type-arg]
    """Include the license alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change what is included, if that is for an editable install."""
        if version == "editable":
            package = self.metadata.name.replace("-", "/")
            build_data["force_include_editable"]["../../LICENSE"] = f"{package}/LICENSE"
