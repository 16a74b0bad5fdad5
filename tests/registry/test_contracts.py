"""The numbered contracts of parts, against the classes that hold them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from opgraft import CustomOp, Platform
from opgraft.distributed import Communicator
from opgraft.kernels import LinearMethodBase
from opgraft.kernels.engine import (
    Executor,
    KVCacheManager,
    MemoryQuery,
    ModelRunner,
    Proposer,
    Sampler,
    Scheduler,
    StaticGraph,
    StepGraph,
    Worker,
)
from opgraft.ops import Attention
from opgraft.registry.contracts import CONTRACTS

KEPT = Path(__file__).with_name("contracts.json")
CLASSES: dict[str, type] = {
    "kernel": CustomOp,
    "weight_method": LinearMethodBase,
    "attention": Attention,
    "communicator": Communicator,
    "worker": Worker,
    "model_runner": ModelRunner,
    "sampler": Sampler,
    "scheduler": Scheduler,
    "kv_cache_manager": KVCacheManager,
    "proposer": Proposer,
    "executor": Executor,
    "memory_query": MemoryQuery,
    "step_graph": StepGraph,
    "static_graph": StaticGraph,
    "platform": Platform,
}


Members = dict[str, list[str] | None]
"""Member of a class → the parameters of a method, with ``=`` behind an optional one; None for other members."""


def members_of(cls: type) -> Members:
    """The public members of a class that opgraft defines."""
    found: Members = {}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        owner: Any = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or not owner.__module__.startswith("opgraft"):
            continue
        found[name] = parameters_of(member) if inspect.isroutine(member) else None
    return found


def parameters_of(method: Any) -> list[str]:
    rows = []
    for each in inspect.signature(method).parameters.values():
        is_optional = each.default is not each.empty or each.kind in (
            each.VAR_POSITIONAL,
            each.VAR_KEYWORD,
        )
        rows.append(f"{each.name}=" if is_optional else each.name)
    return rows


def broken(kept: Members, now: Members) -> list[str]:
    """The members that callers or replacements of the recorded ones cannot rely on any more."""
    found = []
    for name, parameters in kept.items():
        if name not in now or (parameters is None) != (now[name] is None):
            found.append(name)
        elif parameters is not None:
            present = now[name] or []
            known = [row for row in present if row in parameters]
            added = [row for row in present if row not in parameters]
            if known != parameters or not all(row.endswith("=") for row in added):
                found.append(name)
    return found


def test_every_part_has_a_class() -> None:
    """The table of numbers and this test know the same parts."""
    assert CLASSES.keys() == CONTRACTS.keys()


@pytest.mark.parametrize("part", CLASSES)
def test_a_part_changes_with_its_number(part: str) -> None:
    """All members that were recorded for a number are there, and take what they took."""
    number, kept = json.loads(KEPT.read_text())[part]
    changed = broken(kept, members_of(CLASSES[part]))
    assert (number, changed) == (CONTRACTS[part], []), (
        f"the contract of {part!r} has changed in {changed}: raise its number in "
        f"core/registry/contracts.py if opgraft was released since, and write the new members to "
        f"{KEPT.name}: {json.dumps([CONTRACTS[part], members_of(CLASSES[part])])}"
    )


@pytest.mark.parametrize(
    ("now", "faults"),
    [
        ({"run": ["self", "step"], "size": None}, []),
        ({"run": ["self", "step", "more="], "size": None, "new": ["self", "x"]}, []),
        ({"run": ["self", "step", "more"], "size": None}, ["run"]),
        ({"run": ["self"], "size": None}, ["run"]),
        ({"run": ["step", "self"], "size": None}, ["run"]),
        ({"run": None, "size": None}, ["run"]),
        ({"run": ["self", "step"]}, ["size"]),
    ],
)
def test_what_breaks_a_contract(now: Members, faults: list[str]) -> None:
    """Missing members and parameters, and new parameters without a default; additions do not."""
    assert broken({"run": ["self", "step"], "size": None}, now) == faults
