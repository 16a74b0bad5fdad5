"""The generated pages of ops say what the code says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import op_pages
import pytest
from docstrings import broken, documentation, parameters_of
from opgraft import functional
from opgraft.binding.functional import FUNCTIONALS
from opgraft.ops import CustomOp
from opgraft.plugins.host import load_plugins
from opgraft.testing.catalogue import SPECS

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs/reference/ops"


@pytest.mark.source
def test_what_is_generated_is_current() -> None:
    """The pages, the table and the navigation are what 'make op-pages' writes, and no page is left of an op gone."""
    load_plugins()
    pages = op_pages.all_pages()
    changed = [
        path.name
        for path, text in pages.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert changed == [], "renew them by 'make op-pages'"
    assert set(FOLDER.glob("*.md")) <= set(pages)


def test_every_op_and_every_form_has_its_place() -> None:
    """Each registered op has a page; each functional form stands on one, with the op that torch knows."""
    ops = {
        name for name, cls in CustomOp.op_registry.items() if cls.__module__.startswith("opgraft.")
    }
    texts = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert set(texts) == ops
    shown = [
        name for text in texts.values() for name in re.findall(r"^## Function `(\w+)`$", text, re.M)
    ]
    assert sorted(shown) == sorted(functional.__all__)
    assert all(
        f"\ntorch.ops.opgraft.{name}\n" in "".join(texts.values()) for name in functional.__all__
    )


def test_every_form_has_a_worst_case_or_a_reason() -> None:
    """A worst case by dtype is a positive number or zero; a reason continues a sentence."""
    assert set(op_pages.DERIVED) == set(SPECS), "renew them by 'make tolerances'"
    for derived in op_pages.DERIVED.values():
        if isinstance(derived, str):
            assert re.match("[a-z]", derived)
            assert not derived.endswith(".")
        else:
            assert derived
            assert all(share >= 0 for share in derived.values())


@pytest.mark.parametrize("form", ["rms_norm", "silu_", "gelu_and_mul"])
def test_a_page_tells_signature_variants_tolerances_and_cost(form: str) -> None:
    """Of a form: how it is called, under which settings and how closely it was checked, and what a call costs."""
    (text,) = [
        p.read_text("utf-8")
        for p in FOLDER.glob("*.md")
        if f"## Function `{form}`" in p.read_text("utf-8")
    ]
    section = text.partition(f"## Function `{form}`")[2].partition("\n## ")[0]
    spec = SPECS[form]
    assert f"opgraft.functional.{form}(" in section
    assert ("Writes to `x`" in section) == bool(FUNCTIONALS[form].mutates)
    for variant in filter(None, spec.variants):
        assert f"\n| {variant} | `" in section
    for dtype in spec.dtypes:
        absolute, relative = spec.tolerance(dtype)
        assert f"| `{str(dtype).removeprefix('torch.')}` | {absolute:g} | {relative:g} |" in section
    assert re.search(r"[\d,]+ floating-point\s+operations", section)


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        (
            "One ``x``, see\narXiv:1910.07467.",
            ["One `x`, see [arXiv:1910.07467](https://arxiv.org/abs/1910.07467)."],
        ),
        (
            "Args:\n    x: one\n        more.\n    y: two.",
            ["Args:\n\n- `x`: one more.\n- `y`: two."],
        ),
        ("Text.\n\nShapes:\n    ``x`` is ``[d]``.", ["Text.", "Shapes: `x` is `[d]`."]),
        (None, []),
    ],
)
def test_docstrings_become_markdown(docstring: str | None, markdown: list[str]) -> None:
    """Code, links and sections of docstrings are those of Markdown."""
    assert list(documentation(docstring)) == markdown


def test_no_line_of_a_paragraph_begins_a_list() -> None:
    """Where a formula is broken, no line begins with its sign, which Markdown takes for a list item."""
    lines = op_pages.filled("a " * 57 + "b + c - d * e 1. f # g " * 9).splitlines()
    assert len(lines) > 2
    assert [line for line in lines if re.match(r"([-+*#>]|\d+\.) ", line)] == []


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (lambda self, a, *, b, c=1: None, "(a, *, b, c=1)"),
        (lambda self, *args, a=1, **others: None, "(*args, a=1, **others)"),
    ],
)
def test_signatures_are_written_as_python_takes_them(
    function: Callable[..., None], written: str
) -> None:
    """A star stands before what goes by name only, unless one is there that takes the rest."""
    assert parameters_of(function) == written


def test_long_signatures_are_broken_at_their_parameters() -> None:
    """A parameter per line, with the commas inside of types left alone."""
    line = f"name({'first: dict[str, int] = {}, ' * 4}second: Tensor) -> tuple[Tensor, Tensor]"
    assert broken(line).splitlines()[-2:] == ["    second: Tensor,", ") -> tuple[Tensor, Tensor]"]
    assert broken(line).splitlines()[1] == "    first: dict[str, int] = {},"
    assert broken("name(x)") == "name(x)"
