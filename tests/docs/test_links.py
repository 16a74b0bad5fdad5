"""Links lead somewhere, every page is reached, and the site's configuration knows them all."""

from __future__ import annotations

import re
from pathlib import Path

import opgraft
import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *DOCS,
    *sorted((REPOSITORY / "reference_plugins").glob("*/README.md")),
]

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY))
)


def prose_of(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def links_of(page: Path) -> list[str]:
    """The targets of links and of images, in Markdown and in HTML."""
    text = re.sub(r"`[^`\n]*`", "", prose_of(page))
    return [
        *re.findall(r"\]\(([^)\s]+)\)", text),
        *re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text),
    ]


def anchors_of(page: Path) -> set[str]:
    """The anchors of headings: lower case, punctuation dropped, spaces as dashes."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@each_page
def test_internal_links_resolve(page: Path) -> None:
    """Each link to a file leads to one, from a page of the site to one of it, and to a heading if it names one."""
    site = REPOSITORY / "docs"
    for link in links_of(page):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert target.is_relative_to(site) or not page.is_relative_to(site), (
                f"{link} is not on the site"
            )
            themes = {"only-light", "only-dark"} if target.suffix == ".svg" else set()
            assert not anchor or anchor in themes or anchor in anchors_of(target), link


@each_page
def test_external_links_are_https(page: Path) -> None:
    """No link sends a reader over an unencrypted connection."""
    assert [link for link in links_of(page) if link.startswith("http://")] == []


@each_page
def test_no_merge_is_left_half_way(page: Path) -> None:
    """No page has the marks that git leaves where two changes met, and nobody chose."""
    assert re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", prose_of(page), re.M) == []


def test_every_page_is_in_the_navigation() -> None:
    """The site's navigation lists the pages on disk, each once."""
    listed = re.findall(r"[\w./-]+\.md", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(str(page.relative_to(REPOSITORY / "docs")) for page in DOCS)


def test_every_page_is_linked_from_the_first() -> None:
    """The first page leads to every other one, to pages of ops and docstrings by way of the pages above them."""
    linked = {link.partition("#")[0] for link in links_of(REPOSITORY / "docs/index.md")}
    for page in ("ops", "api"):
        linked |= {
            f"reference/{link}" for link in links_of(REPOSITORY / f"docs/reference/{page}.md")
        }
    assert {str(page.relative_to(REPOSITORY / "docs")) for page in DOCS} - linked == {"index.md"}


@each_page
def test_a_page_has_one_title_and_short_lines(page: Path) -> None:
    """A page begins with its one title; prose lines fit 120 columns."""
    text = prose_of(page)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.M)) == 1
    assert [
        line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")
    ] == []


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in the prose leads to a file: below the package, as ways through the code are told, or beside the page."""
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", prose_of(page))
    places = (Path(opgraft.__file__).parent, REPOSITORY, page.parent)
    assert [path for path in named if not any((place / path).is_file() for place in places)] == []
