"""What ranks exchange, and the operators of opgraft in a compiled graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from opgraft.distributed import get_tp_group
from torch import Tensor


def names(compiled: Any) -> Counter[str]:
    """The operators of opgraft in a graph."""
    targets = [str(node.target) for node in compiled.graph.graph.nodes]
    return Counter(name.split(".")[1] for name in targets if name.startswith("opgraft."))


def counts(compiled: Any, name: str) -> tuple[int, int]:
    (report,) = (report for report in compiled.passes if report.name == name)
    return report.matched, report.replaced


def communication(run: Callable[[], Any]) -> tuple[Any, Counter[str], Counter[str]]:
    """What ``run`` returns, the calls of collectives meanwhile, and the bytes that a rank sends at least for each.

    A rank sends all but its own part of what is gathered or scattered; a sum is both.
    """
    group = get_tp_group()
    communicator, calls, moved = group.communicator, Counter[str](), Counter[str]()

    def counted(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *others: Any) -> Tensor:
            result = method(x, *others)
            calls[name] += 1
            whole = max(x.nbytes, result.nbytes) * (2 if name == "all_reduce" else 1)
            moved[name] += whole * (group.world_size - 1) // group.world_size
            return result

        return call

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        vars(communicator)[name] = counted(name, getattr(communicator, name))
    try:
        return run(), calls, moved
    finally:
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            del vars(communicator)[name]
