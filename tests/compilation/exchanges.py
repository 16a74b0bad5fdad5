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
    """What ``run`` returns, the calls of collectives meanwhile, and the bytes that each was given and returned."""
    communicator, calls, moved = get_tp_group().communicator, Counter[str](), Counter[str]()

    def counted(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *others: Any) -> Tensor:
            result = method(x, *others)
            calls[name] += 1
            moved[name] += x.nbytes + result.nbytes
            return result

        return call

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        vars(communicator)[name] = counted(name, getattr(communicator, name))
    try:
        return run(), calls, moved
    finally:
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            del vars(communicator)[name]
