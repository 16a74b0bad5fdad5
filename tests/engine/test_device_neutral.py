"""The engine is the same code on every device: scheduler, cache, sampler, tokenizer and front end name none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core"
DEVICES = frozenset(
    re.findall(
        r"\w+",
        """
        cpu cpus gpu gpus, nvidia cuda cudnn nccl h100 h200, amd rocm hip rccl, intel xpu hpu, tpu xla,
        npu mps mlu musa
        """,
    )
)
OF_VLLM = "gpu_memory_utilization"
"""An argument of vLLM's, which is refused with the name of ours."""

OF_RAY = ("ray_executor.py", "ray_placement.py")
"""Files that ask Ray for resources, which it calls CPU and GPU."""


def names(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of what is named: identifiers, attributes, imports, and strings that are no documentation."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield line, node.value.replace(OF_VLLM, "")
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value


def devices_in(source: str) -> list[tuple[int, str]]:
    words = [(line, text, re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", text)) for line, text in names(source)]
    return [(line, text) for line, text, found in words if DEVICES & {word.lower() for word in found}]


@pytest.mark.parametrize("folder", ["engine", "serving", "planning"])
def test_nothing_names_a_device(folder: str) -> None:
    """No name, string or import below the folder is that of a device or a platform."""
    files = sorted(file for file in (CORE / folder).rglob("*.py") if file.name not in OF_RAY)
    assert files
    assert {str(file): found for file in files if (found := devices_in(file.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x.cuda()", True),
        ("if device.type == 'cpu': pass", True),
        ("from opgraft.platforms.tpu import probe", True),
        ("class CudaGraph: pass", True),
        ("def run(xpu_index): pass", True),
        ("'''Runs on a GPU too.'''", False),
        ("output, chip, relationship = 'input', 2, 'scope'", False),
    ],
)
def test_the_search_finds_names(source: str, found: bool) -> None:
    """Names are recognised as whole words, wherever they stand in code, and not in documentation."""
    assert bool(devices_in(source)) == found
