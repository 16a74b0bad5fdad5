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

OF_RAY = frozenset({"CPU", "GPU", "num_cpus", "num_gpus", "ray_cpus", "cpus", "cpu_count"})
"""Ray's names of resources, the setting that counts them, and how many processors there are."""

EXEMPT = {
    "held.py": frozenset({"max_cpu_loras"}),
    "prometheus.py": frozenset({"gpu_cache_usage_perc", "num_gpu_blocks"}),
    "ray_executor.py": OF_RAY,
    "ray_placement.py": OF_RAY,
    "structured.py": frozenset({"RLIMIT_CPU"}),
}
"""Words that a file may have, as it asks Ray for resources, the system for a limit of processor time, or a setting or
metric of vLLM's name."""


def names(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of what is named: identifiers, attributes, imports, and strings that are no documentation."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            yield line, node.value.replace(OF_VLLM, "")
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value


def devices_in(source: str, exempt: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    found = []
    for line, text in names(source):
        rest = " ".join(name for name in re.findall(r"\w+", text) if name not in exempt)
        if DEVICES & {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", rest)}:
            found.append((line, text))
    return found


@pytest.mark.parametrize("folder", ["engine", "serving"])
def test_nothing_names_a_device(folder: str) -> None:
    """No name, string or import below the folder is that of a device or a platform."""
    files = sorted((CORE / folder).rglob("*.py"))
    assert files
    words = {
        str(file): devices_in(file.read_text("utf-8"), EXEMPT.get(file.name, frozenset()))
        for file in files
    }
    assert {name: found for name, found in words.items() if found} == {}


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


def test_words_are_exempt_and_no_more() -> None:
    """Beside Ray's own words a device is still found, in a name of several words and in a message too."""
    source = "needs = {'CPU': ray_cpus}\nx.cuda()\nsay('lower parallel.ray_cpus on the GPUs')\nnum_gpus_of(x)\n"
    assert devices_in(source, OF_RAY) == [
        (2, "cuda"),
        (3, "lower parallel.ray_cpus on the GPUs"),
        (4, "num_gpus_of"),
    ]
