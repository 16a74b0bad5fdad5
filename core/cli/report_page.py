"""Evidence of conformance as a page: one file that needs nothing else, for browsers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_PLACE = "EVIDENCE</script>"


def page(data: Mapping[str, Any], docs: str | None) -> str:
    """Return the page for evidence as plain data, with links to the documentation at ``docs``."""
    template = files("opgraft.cli").joinpath("report.html").read_text(encoding="utf-8")
    # Text of plugins can then neither end the element nor begin a comment in it.
    text = json.dumps({**data, "docs": docs}).replace("<", "\\u003c")
    before, _, after = template.partition(_PLACE)
    return f"{before}{text}</script>{after}"
