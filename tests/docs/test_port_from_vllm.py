"""The tables of the guide for vLLM's plugins, compared with the code."""

from __future__ import annotations

import importlib
import inspect
import re
from inspect import Parameter
from pathlib import Path
from typing import Any

import opgraft
import pytest
from opgraft import ops
from opgraft.registry.op_classes import reference_method
from opgraft.registry.signatures import method_signature

GUIDE = Path(__file__).parents[2] / "docs/how-to/port-from-vllm.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, as the cells' text."""
    section = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.strip("|").split("|") for line in lines[1:]]


def names(cell: str) -> list[str]:
    """What a cell has in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def parameters(cls: Any, method: str) -> list[Parameter]:
    """What a method takes, without catch-alls."""
    catch_alls = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [
        p for p in method_signature(cls, method).parameters.values() if p.kind not in catch_alls
    ]


SIGNATURES = rows("What takes what")


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: names(row[0])[0])
def test_constructors_and_calls(row: list[str]) -> None:
    """A class takes vLLM's arguments in vLLM's order, and besides exactly what the table says, by keyword."""
    (name, constructor), (call,), besides = (names(cell) for cell in row)
    cls = getattr(ops, name)
    positional, _, by_keyword = constructor.strip("()").partition("*")
    first = [part for part in positional.replace(" ", "").split(",") if part]
    more = [part for part in by_keyword.replace(" ", "").split(",") if part]
    taken = parameters(cls, "__init__") if first or more or besides else []
    in_order = [p.name for p in taken if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    assert in_order[: len(first)] == first
    assert {p.name for p in taken} == {*first, *more, *besides}
    assert all(p.default is not Parameter.empty for p in taken if p.name in besides)
    method = reference_method(cls)
    assert method is not None
    assert [p.name for p in parameters(cls, method)] == call.strip("()").split(", ")


def own_classes() -> set[str]:
    """The classes of opgraft's own, and torch's: those whose rows in the reference of ops say so."""
    lines = (GUIDE.parents[1] / "reference/ops.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| [`")]
    return {names(cell)[1] for cell, maths in cells if OWN.search(maths.strip())}


OWN = re.compile(r"opgraft's own|torch's function|a `(torch\.nn\.\w+|PluggableLayer)`$")


def test_every_class_is_in_the_table() -> None:
    """What opgraft shares with vLLM's layers is listed once; the rest is opgraft's own, or torch's."""
    listed = [names(row[0])[0] for row in SIGNATURES]
    exported = {name: getattr(ops, name) for name in ops.__all__}
    classes = {
        name
        for name, cls in exported.items()
        if inspect.isclass(cls) and issubclass(cls, ops.CustomOp)
    }
    classes -= {"CustomOp", "PluggableLayer", "LinearBase"}
    assert len(listed) == len(set(listed))
    assert classes - own_classes() <= set(listed) <= classes


@pytest.mark.parametrize(
    "row", rows("Helpers that kernels call and override"), ids=lambda row: row[0]
)
def test_helpers(row: list[str]) -> None:
    """Each helper and attribute is there on an op, or on its class."""
    (owner,) = names(row[0])
    for name in names(row[1]):
        found = hasattr(getattr(ops, owner), name) or name in inspect.getsource(getattr(ops, owner))
        assert found, f"{owner}.{name}"


def test_imports() -> None:
    """What the first table says comes from opgraft can be imported from there."""
    module = importlib.import_module("opgraft.custom_op")
    for name in names(rows("Change the imports")[0][0])[1:]:
        assert hasattr(module, name)
    assert {"get_rope", "apply_interleaved_rope"} <= set(ops.__all__)
    logger = importlib.import_module("opgraft.logger")
    for name in ("warning_once", "info_once", "debug_once", "error_once"):
        assert name in TEXT
        assert hasattr(logger.logger, name)
    assert callable(opgraft.direct_register_custom_op)
