"""The report of ``opgraft conformance`` in a real browser: headless Chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opgraft.cli import cli as commands
from opgraft.cli.evidence import ConformanceEvidence
from opgraft.cli.report_page import page as page_of

HOSTILE = "</script><img src=x onerror=document.title='hit'><!--"
HOSTILE_FILE = f"{HOSTILE}:7"
DOCS = "https://docs.example/opgraft"
LINES = """cells => cells.map(cell => {
  const text = document.createRange();
  text.selectNodeContents(cell);
  return text.getClientRects().length;
})"""
"""The number of lines that the text of each cell takes."""


def outcome(op: str, check: str, dtype: str | None, status: str, **more: Any) -> dict[str, Any]:
    figures = {"reason": "", "error": None, "speed": None, "seconds": 0.1}
    return {"op": op, "check": check, "dtype": dtype, "status": status, **figures, **more}


def noted(never_run: str, unknown: str = "") -> dict[str, Any]:
    return {"run": [], "never_run": [never_run], "unknown": unknown}


def evidence() -> ConformanceEvidence:
    """Answers of every kind about two forms of an op, a part of the engine and a platform."""
    found = ConformanceEvidence(
        {
            "plugin": "acme",
            "provider": {"name": "acme-npu", "version": "1.0"},
            "platform": "acme",
            "device": "Acme A1",
            "versions": {"opgraft": "0.1.0", "torch": "2.9"},
            "date": "2026-11-24",
            "brief": False,
            "checks": {"values": "results are those of the reference"},
            "ops": {
                "rms_norm": "rms_norm",
                "fused_add_rms_norm": "rms_norm",
                "attention": "attention",
            },
        },
        cases=9,
    )
    for each in (
        outcome("(plugin)", "registration", None, "passed"),
        outcome("(platform)", "memory", None, "failed", reason="memory(0) tells 2 bytes free of 1"),
        outcome(
            "rms_norm", "values", "float32", "passed", error=0.0691, lines=noted("norms.py:3-9")
        ),
        outcome(
            "rms_norm", "values", "bfloat16", "passed", error=0.8412, lines=noted(HOSTILE_FILE)
        ),
        outcome("rms_norm", "speed", "float32", "passed", speed=0.5),
        outcome("rms_norm", "speed", "bfloat16", "passed", speed=3.25),
        outcome("fused_add_rms_norm", "values", "float32", "failed", reason=HOSTILE),
        outcome("fused_add_rms_norm", "values", "bfloat16", "passed", error=0.3),
        outcome("attention", "values", None, "skipped", reason="no functional form"),
    ):
        found.add(each)
    return found


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the report without network; nothing may be written to its console."""
    file = tmp_path / "report.html"
    file.write_text(page_of(evidence().to_dict(), DOCS), encoding="utf-8")
    contexts, lines = [], []

    def visit(**options: Any) -> Any:
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda line: lines.append(line.text))
        page.on("pageerror", lambda error: lines.append(str(error)))
        page.goto(file.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not lines


def cells(page: Any) -> dict[str, list[str]]:
    """The texts of the matrix by op."""
    rows = [
        row.locator("th, td").all_text_contents() for row in page.locator("#matrix tbody tr").all()
    ]
    return {name: texts for name, *texts in rows}


def test_the_matrix_has_the_worst_of_each_check(visit: Callable[..., Any]) -> None:
    """A cell shows the largest error or the least speed of its dtypes, a failure first; hovering shows each."""
    page = visit()
    assert page.title() == "acme-npu 1.0: conformance"
    assert (
        page.locator("#about").text_content()
        == "acme on acme (Acme A1); opgraft 0.1.0, torch 2.9, 2026-11-24"
    )
    assert page.locator("#counts").inner_text().split() == [
        "6",
        "passed",
        "2",
        "failed",
        "1",
        "skipped",
    ]
    assert cells(page) == {
        "rms_norm": ["0.84", "0.50\u00d7"],
        "fused_add_rms_norm": ["✗", ""],
        "attention": ["\u2013", ""],
    }
    worst = page.locator("#matrix td.near")
    assert worst.get_attribute("title") == (
        "float32, passed, error 0.069 of tolerance\nbfloat16, passed, error 0.841 of tolerance"
    )
    assert page.locator("#whole").get_by_text("2 bytes free of 1").is_visible()
    assert (
        page.locator("#matrix thead th").nth(1).get_attribute("title")
        == "results are those of the reference"
    )
    link = page.locator("#matrix").get_by_role("link", name="fused_add_rms_norm")
    assert link.get_attribute("href") == f"{DOCS}/reference/ops/rms_norm/"


def test_failures_come_first(visit: Callable[..., Any]) -> None:
    """The first table has each failure with its reason, whatever the filters leave."""
    page = visit()
    page.get_by_label("Status").select_option("passed")
    assert page.locator("table").first.get_attribute("id") == "failed"
    rows = page.locator("#failed tbody tr").all()
    assert [row.locator("td").all_text_contents() for row in rows] == [
        ["(platform)", "memory", "", "memory(0) tells 2 bytes free of 1"],
        ["fused_add_rms_norm", "values", "float32", HOSTILE],
    ]


def test_lines_that_no_input_reached(visit: Callable[..., Any]) -> None:
    """A table has them by op, for all dtypes together, and names of files are shown as text."""
    page = visit()
    assert page.get_by_role("heading", name="Lines that no input reached").is_visible()
    rows = page.locator("#lines tbody tr").all()
    assert [row.locator("td").all_text_contents() for row in rows] == [
        ["rms_norm", f"{HOSTILE_FILE}, norms.py:3-9", ""]
    ]


def test_filters_leave_what_they_name(visit: Callable[..., Any]) -> None:
    """By dtype and by status, in the matrix and in the table, whose text is shown as text."""
    page = visit()
    page.get_by_label("Dtype").select_option("bfloat16")
    assert cells(page) == {"rms_norm": ["0.84", "3.3\u00d7"], "fused_add_rms_norm": ["0.30", ""]}
    page.get_by_label("Dtype").select_option("")
    page.get_by_label("Status").select_option("failed")
    assert cells(page) == {"fused_add_rms_norm": ["✗", ""]}
    assert page.get_by_role("status").text_content() == "2 of 9 answers"
    page.get_by_text("Show the table").click()
    rows = [
        row.locator("td").all_text_contents() for row in page.locator("#answers tbody tr").all()
    ]
    assert [row[-1] for row in rows] == ["memory(0) tells 2 bytes free of 1", HOSTILE]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_accessible(visit: Callable[..., Any], scheme: str, width: int) -> None:
    """Light and dark, wide and on a phone, axe finds no fault, contrast included; nothing is wider than the window.

    Names keep to one line, however narrow the window is.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(color_scheme=scheme, viewport={"width": width, "height": 740})
    page.get_by_text("Show the table").click()
    found = axe.Axe().run(page)
    assert not found.violations_count, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    names = page.locator("#whole td:nth-child(-n+3), #answers td:nth-child(-n+4)")
    assert set(names.evaluate_all(LINES)) == {0, 1}


def test_an_address_that_is_no_address() -> None:
    """What the report links to begins with a scheme that is harmless."""
    result = CliRunner().invoke(commands, ["conformance", "acme", "--docs", "javascript:alert(1)"])
    assert "--docs is 'javascript:alert(1)': name an address that begins with https://" in str(
        result.exception
    )
