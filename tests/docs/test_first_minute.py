"""The first minute of a reader: the first screen, the figures, and what copying an example takes along."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name
from pygments.token import Generic

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
FIGURES = DOCS / "figures"
PAGES = sorted(DOCS.rglob("*.md"))
SCREEN = 45
"""Lines that a reader sees without scrolling, about."""


@pytest.mark.parametrize(
    "page", [REPOSITORY / "README.md", DOCS / "index.md"], ids=lambda page: page.name
)
def test_install_and_code_are_on_the_first_screen(page: Path, blocks_of) -> None:
    """What it is, how it is installed and what it looks like take no scrolling, and the code has ten lines."""
    first = [block for block in blocks_of(page) if block.line < SCREEN]
    assert [block.language for block in first[:3]] == ["sh", "python", "text"]
    assert first[0].text.startswith("pip install ")
    assert len([line for line in first[1].text.splitlines() if line]) <= 10
    assert first[1].line + len(first[1].text.splitlines()) < SCREEN


def test_the_readme_shows_no_prompts(blocks_of) -> None:
    """Its pages copy blocks whole, so that a block has commands or output, never both."""
    blocks = blocks_of(REPOSITORY / "README.md")
    assert {block.language for block in blocks} == {"sh", "python", "text"}
    assert [block.line for block in blocks if block.text.startswith("$ ")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_copying_a_console_block_takes_the_commands_only(page: Path, blocks_of) -> None:
    """Without what the lexer marks as prompt and output, which the style sheet hides, the typed lines are left."""
    for block in blocks_of(page):
        if block.language == "console":
            tokens = get_lexer_by_name("console").get_tokens(block.text)
            left = "".join(
                text for kind, text in tokens if kind not in (Generic.Prompt, Generic.Output)
            )
            typed = [
                line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")
            ]
            assert [line for line in left.splitlines() if line] == typed, f"{page}:{block.line}"


def test_the_style_sheet_hides_prompts_and_output_from_copying() -> None:
    """The theme marks the page while it copies, and reads what is displayed."""
    sheet = (DOCS / "stylesheets/extra.css").read_text(encoding="utf-8")
    rule = re.search(
        r"\[data-md-copying\] \.gp,\s*\[data-md-copying\] \.go \{\s*display: none;\s*\}", sheet
    )
    assert rule, sheet


def test_the_site_helps_its_readers() -> None:
    """Pages lead to the previous and the next, follow the system's colours, copy code, and link to the repository."""
    lines = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    switched = {line.partition("#")[0].strip() for line in lines}
    schemes = {f'media: "(prefers-color-scheme: {colour})"' for colour in ("light", "dark")}
    assert {
        "- navigation.footer",
        "- content.code.copy",
        "scheme: slate",
        *(f"- {line}" for line in schemes),
    } <= switched
    assert any(line.startswith("repo_url: !ENV") for line in lines)


def test_the_figures_are_those_of_the_committed_measurements(tmp_path: Path) -> None:
    """The committed files are what the tool draws of the committed JSON, and none is left of a figure gone."""
    tool = [sys.executable, str(REPOSITORY / "tools/figures.py"), "--output", str(tmp_path)]
    subprocess.run(tool, check=True, capture_output=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*-*.svg")}
    assert drawn == committed, "renew them by 'make figures'"


def test_tables_are_those_of_the_committed_measurements() -> None:
    """The pages have what the tool makes of the committed JSON: a row for each, with target and verdict."""
    tool = runpy.run_path(str(REPOSITORY / "tools/figure_tables.py"))
    for path, tables in tool["tables"]().items():
        text = path.read_text(encoding="utf-8")
        assert tool["page"](text, tables) == text, "renew it by 'make figures'"
        assert all(rows and rows in text for rows in tables.values())
    row = {
        "name": "a",
        "measured": 1.25,
        "least": 1.4,
        "most": None,
        "bound": 1.3,
        "verdict": "beyond",
        "detail": "b",
    }
    assert tool["_result"](row) == "| a | 1.25 | ≥ 1.4 | at most 1.3 here | b |\n"


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*-*.svg")), ids=lambda path: path.name)
def test_a_figure_can_be_read_without_seeing_it(path: Path) -> None:
    """It has a title and a description, by which it is labelled, its words are text, and its twin differs in colour."""
    root = ET.parse(path).getroot()  # noqa: S314  # our own file
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert root.get("role") == "img"
    labels = [root.find(f".//*[@id='{name}']") for name in str(root.get("aria-labelledby")).split()]
    assert [label is not None and len(label.text or "") > 10 for label in labels] == [True, True]
    assert len(root.findall(".//svg:text", space)) > 10
    name, _, theme = path.stem.rpartition("-")
    twin = ET.parse(  # noqa: S314
        path.with_name(f"{name}-{'dark' if theme == 'light' else 'light'}.svg")
    ).getroot()
    words = [[text.text for text in each.findall(".//svg:text", space)] for each in (root, twin)]
    assert words[0] == words[1]


def test_text_that_may_leave_a_figure_is_refused() -> None:
    """The tool has room for wide fonts, in which some readers see the figures."""
    figure = runpy.run_path(str(REPOSITORY / "tools/svg.py"))["Figure"]("title", "description")
    figure.text(0, 18, "w" * 60)
    with pytest.raises(ValueError, match="no room for 'ww"):
        figure.text(0, 18, "w" * 66)


def test_the_figures_ask_nobody_for_anything() -> None:
    """No font, image or script comes from elsewhere, in the figures and in the site's configuration."""
    texts = [path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")]
    texts += [
        (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"),
        (DOCS / "stylesheets/extra.css").read_text(),
    ]
    outside = [link for text in texts for link in re.findall(r"(?:https?:)?//[\w./]+", text)]
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_the_toy_plugin_is_copied_without_its_build_folder(reader) -> None:
    """The commands of the guide leave behind what pip built in the original, and install the copy's modules only."""
    toy = reader.folder / "reference_plugins/opgraft-toy-npu"
    built = toy / "build/lib/opgraft_toy_npu"
    shutil.copytree(toy / "src/opgraft_toy_npu", built)
    (toy / "src/opgraft_toy_npu.egg-info").mkdir()
    (toy / "src/opgraft_toy_npu.egg-info/SOURCES.txt").write_text(
        "src/opgraft_toy_npu/__init__.py\n"
    )
    reader.follow(DOCS / "how-to/device-plugin.md", "Copy it and give it your name")
    (packages,) = reader.environment.glob("lib/python*/site-packages")
    assert [path.name for path in packages.glob("opgraft_*npu")] == ["opgraft_acme_npu"]
