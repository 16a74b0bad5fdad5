"""Static graphs of a simulated accelerator, by torch's names: kernels run again on their memory.

As on a real device, a recording notes kernels and addresses. Python between the kernels does not
run in a replay, and the host gets no value during a recording. Memory that is freed during the
recording is freed at the same place of a replay.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opgraft.testing.simulated_streams import current_stream
from torch import Tensor


class Graph:
    """A sequence of kernels.

    Attributes:
        kernels: the recorded kernels, in order, with what frees memory between them.
    """

    def __init__(self) -> None:
        self.kernels: list[Callable[[], object]] = []
        self._memory: dict[int, Any] = {}

    def pool(self) -> tuple[int, int]:
        """Return the memory that another graph may share. Here each graph has memory of its own."""
        return (0, 0)

    def replay(self) -> None:
        """Run the kernels on the current stream."""
        current_stream().put(self._run)

    def _run(self) -> None:
        with torch.inference_mode():
            for kernel in self.kernels:
                kernel()

    def add(
        self,
        name: str,
        run: Callable[[], Any],
        given: Sequence[Tensor],
        result: Any,
        writes: bool,
    ) -> None:
        """Record a kernel.

        Args:
            name: the operator.
            run: runs the kernel once more, on the same arguments.
            given: the numbers of the tensors among the arguments.
            result: the first result.
            writes: the kernel writes to an argument.

        Raises:
            RuntimeError: the result is a value for the host.
        """
        results = _results_of(result)
        if not all(isinstance(each, Tensor) for each in results):
            raise RuntimeError(
                f"{name} gives the host a value, which no recording has: the value may differ in "
                "a replay"
            )
        shared = {each.untyped_storage().data_ptr() for each in given}
        fresh = [each.untyped_storage().data_ptr() not in shared for each in results]
        # A view of an argument computes nothing, and a replay need not make it again.
        if writes or any(fresh):
            self.kernels.append(_Kernel(run, results, fresh))
        for each, is_fresh in zip(results, fresh, strict=True):
            if is_fresh:
                memory = each.untyped_storage()
                self._memory[memory.data_ptr()] = memory

    def free(self, address: int) -> None:
        """Free memory that no tensor of the device has any more, now and in each replay.

        Args:
            address: of the memory. Nothing happens if the memory is of no recorded result.
        """
        memory = self._memory.pop(address, None)
        if memory is None:
            return
        # A program that still reads the memory fails, instead of reading old numbers.
        memory.resize_(0)
        self.kernels.append(functools.partial(memory.resize_, 0))


def _results_of(returned: Any) -> list[Any]:
    """Return the results of an operator as a list; an operator without results returns ``None``."""
    if returned is None:
        return []
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


class _Kernel:
    """A recorded kernel, with the memory for results.

    Args:
        run: see ``Graph.add``.
        results: the first results.
        fresh: for each result, True if its memory is not that of an argument.
    """

    def __init__(
        self, run: Callable[[], Any], results: Sequence[Tensor], fresh: Sequence[bool]
    ) -> None:
        self._run = run
        self._results = results
        self._fresh = fresh
        self._sizes = [each.untyped_storage().nbytes() for each in results]

    def __call__(self) -> None:
        computed = _results_of(self._run())
        rows = zip(self._results, computed, self._fresh, self._sizes, strict=True)
        for result, new, is_fresh, size in rows:
            if is_fresh:
                # The recording may have freed the memory after its last use.
                result.untyped_storage().resize_(size)
                # Later kernels of the recording read from this tensor.
                result.copy_(new)


class _Current(threading.local):
    graph: Graph | None = None


_current = _Current()


def recording_graph() -> Graph | None:
    """Return the graph that this thread records; ``None`` outside of a recording."""
    return _current.graph


@contextmanager
def graph(recorded: Graph, pool: object = None) -> Iterator[None]:
    """Return a scope that records the kernels of this thread, by the name that torch has for it.

    Args:
        recorded: gets the kernels.
        pool: unused.
    """
    _current.graph = recorded
    try:
        yield
    finally:
        _current.graph = None
