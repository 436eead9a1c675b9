"""A kernel's whole source text: macros, then a file of this folder with all that it includes, each once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.M)
ROOT = HERE.parent  # includes are named from here


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace("#pragma once\n", "")


def inlined(name: str, printed: Mapping[str, str], folders: Sequence[Path] = (ROOT,)) -> str:
    """The file with what it includes in the place of each `#include`, once.

    `printed` are texts that take a file's place. Of several folders the first that has a file serves.
    """
    seen: set[str] = set()

    def include(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        if name in printed:
            found = printed[name]
        else:
            found = text(next(folder / name for folder in folders if (folder / name).exists()))
        return INCLUDE.sub(lambda match: include(match[1]), found)

    return include(name)
