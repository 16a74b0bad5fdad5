"""The numbered contracts of parts, against the classes that hold them."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
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


def described(cls: type) -> dict[str, str]:
    """The public members of a class, with the signatures of its methods."""
    members: dict[str, str] = {}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        owner: Any = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or not owner.__module__.startswith("opgraft"):
            continue
        signature = str(inspect.signature(member)) if inspect.isroutine(member) else ""
        # A function as a default has another address in each process.
        members[name] = re.sub(r" at 0x\w+", "", signature)
    return members


def digest(cls: type) -> str:
    return hashlib.sha256(json.dumps(described(cls), sort_keys=True).encode()).hexdigest()[:16]


def test_every_part_has_a_class() -> None:
    """The table of numbers and this test know the same parts."""
    assert CLASSES.keys() == CONTRACTS.keys()


@pytest.mark.parametrize("part", CLASSES)
def test_a_part_changes_with_its_number(part: str) -> None:
    """The members and signatures of a part are those that were recorded for its number."""
    kept = json.loads(KEPT.read_text())[part]
    assert [CONTRACTS[part], digest(CLASSES[part])] == kept, (
        f"the contract of {part!r} has changed. If a released plugin may break, raise its number in "
        f"core/registry/contracts.py. Then write the new pair to {KEPT.name}: "
        f"{[CONTRACTS[part], digest(CLASSES[part])]}"
    )


def test_a_change_of_a_signature_is_found() -> None:
    """Another argument, and another method, change the digest; a private method does not."""

    class Other(Sampler):
        pass

    before = digest(Sampler)
    Other.__module__ = "opgraft.test"
    assert digest(Other) == before
    Other._private = lambda self: None  # type: ignore[attr-defined]
    assert digest(Other) == before
    Other.more = lambda self, x: None  # type: ignore[attr-defined]
    assert digest(Other) != before
