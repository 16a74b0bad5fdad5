"""What the page about clients shows, for the tests of these clients."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "point-a-client.md"
SERVER = "http://127.0.0.1:8000"
"""The server of the page."""


def block(start: str, server: str) -> str:
    """Return the block of the page that begins with a text, for another server.

    Raises:
        ValueError: not exactly one block begins so.
    """
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```$", text, re.M | re.S)
    (found,) = [each for each in blocks if each.startswith(start)]
    return str(found).replace(SERVER, server)


def command(start: str, server: str, folder: Path) -> list[str]:
    """Return the words of a command of the page, with the folder of a tokenizer."""
    text = block(start, server).replace("FOLDER", str(folder))
    return shlex.split(text.replace("\\\n", " "))
