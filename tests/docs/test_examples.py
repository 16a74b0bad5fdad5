"""Every page does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GENERATED = REPOSITORY / "docs/reference/ops"  # which show signatures, and nothing to follow
WRITTEN = sorted(page for page in (REPOSITORY / "docs").rglob("*.md") if page.parent != GENERATED)
PAGES = [REPOSITORY / "README.md", *WRITTEN]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_does_what_it_says(page: Path, reader) -> None:
    """Followed from top to bottom, every command succeeds, every example runs, and the output shown is what comes."""
    reader.follow(page)
