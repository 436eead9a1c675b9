"""The long description that indexes show: README.md, whose links into the repository get its address.

No address is written here: the release workflow names its own repository by KULLBACK_REPOSITORY. Without that, links
stay as they are, which is right in a checkout and in an sdist.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def with_address(text: str, address: str, ref: str) -> str:
    """Markdown whose relative links lead to files of the repository at a tag, and pictures to their bytes."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}({address}/{kind}/{ref}/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)", absolute, text)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get("KULLBACK_REPOSITORY", "").rstrip("/")
        if address:
            text = with_address(text, address, os.environ.get("GITHUB_REF_NAME", "main"))
            metadata["urls"] = {
                "Repository": address,
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
