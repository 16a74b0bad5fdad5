"""Budgets of lines: what is to be read as a whole stays short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

REPOSITORY = Path(__file__).parents[2]
TOY_NPU = "reference_plugins/opgraft-toy-npu/src/**/*.py"
KIT = (
    "core/testing/*conformance.py",
    "core/testing/*check*.py",
    "core/testing/subjects.py",
    "core/testing/pytest_plugin.py",
    "core/testing/isolation.py",
)


@pytest.mark.parametrize(("patterns", "least", "most"), [((TOY_NPU,), 100, 150), (KIT, 1000, 1250)])
def test_what_others_read_is_short(patterns: tuple[str, ...], least: int, most: int) -> None:
    """The toy NPU and the conformance kit keep to their lines of code, blank ones, comments and docstrings apart."""
    lines = 0
    for path in {path for pattern in patterns for path in REPOSITORY.glob(pattern)}:
        text = path.read_text(encoding="utf-8")
        told = {number for node in ast.walk(ast.parse(text)) if is_text(node) for number in span(node)}
        code = enumerate(text.splitlines(), 1)
        lines += sum(number not in told and line.lstrip()[:1] not in ("", "#") for number, line in code)
    assert least < lines < most


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or text below a name that tells of it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def span(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]  # a statement has both
