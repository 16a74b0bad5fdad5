"""Every page does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.documents

REPOSITORY = Path(__file__).parents[2]
GENERATED = REPOSITORY / "docs/reference/ops"  # which show signatures, and nothing to follow
WRITTEN = sorted(page for page in (REPOSITORY / "docs").rglob("*.md") if page.parent != GENERATED)
README = REPOSITORY / "README.md"


def test_files_of_the_repository_are_shown_as_they_are(blocks_of) -> None:
    """A page reads well where it is not built, so files stand in it in full; each is what the repository holds."""
    shown = [
        block
        for page in WRITTEN
        for block in blocks_of(page)
        if (REPOSITORY / (block.title or "-")).is_file()
    ]
    for block in shown:
        assert block.text.rstrip() == (REPOSITORY / str(block.title)).read_text("utf-8").rstrip(), (
            block.title
        )
    assert sum("opgraft-toy-npu" in str(block.title) for block in shown) == 5
    markers = [str(page) for page in WRITTEN if "--8<--" in page.read_text("utf-8")]
    assert not markers


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated"
)  # torch's own, where inductor starts
@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_does_what_it_says(page: Path, reader) -> None:
    """Followed from top to bottom, every command succeeds, every example runs, and the output shown is what comes."""
    reader.follow(page)


def sections() -> list[str]:
    """The headings of the README, each of which claims one thing and is read alone."""
    return re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", README.read_text("utf-8"), flags=re.M | re.S), re.M
    )


@pytest.mark.parametrize("section", sections())
def test_a_claim_of_the_readme_holds(section: str, reader) -> None:
    """Each section holds for who starts with it: commands succeed, examples run, and the output shown is what comes."""
    reader.follow(README, section)
