"""The table of targets in the Makefile, as text."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
_ROW = re.compile(r"^(help|needs|run)\.([\w-]+) = (.*)$", re.M)
_BLOCK = re.compile(r"^define run\.([\w-]+)\n(.*?)^endef$", re.M | re.S)


def _column(name: str) -> dict[str, str]:
    return {target: text for column, target, text in _ROW.findall(_TEXT) if column == name}


HELP = _column("help")
"""Target → its line of ``make help``."""

NEEDS = _column("needs")
"""Target → files and targets that are made before."""

COMMANDS = {**_column("run"), **dict(_BLOCK.findall(_TEXT))}
"""Target → its commands, with make's variables."""
