"""Code: what a captured graph becomes by passes, lowering and a backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opgraft.compilation.backends import Runner, built
from opgraft.compilation.capture import Captured
from opgraft.compilation.graph_pass import PassReport
from opgraft.compilation.lowering import lower
from opgraft.compilation.manager import ALL_SIZES, run_passes
from opgraft.compilation.nodes import PARTS
from opgraft.compilation.passes import passes_of
from opgraft.config import CompilationConfig, CompilationMode
from opgraft.decision import Decision
from opgraft.errors import CompilationError
from torch import fx, nn


@dataclass(frozen=True)
class Code:
    """A graph, and the function that runs it.

    Attributes:
        graph: what was captured, after all passes, with semantic nodes.
        passes: the record of each, in order.
        lowerings: for each form what its nodes have become.
        run: called with the tensors of the placeholders.
        joint: parameters over whose memory the graph has joint tensors, each with its address.
    """

    graph: fx.GraphModule
    passes: tuple[PassReport, ...]
    lowerings: tuple[Decision, ...]
    run: Runner
    joint: tuple[tuple[nn.Parameter, int], ...]

    def expect_unmoved(self, model: nn.Module) -> None:
        """Raise ``CompilationError`` where parameters of ``joint`` lie elsewhere now."""
        if any(parameter.data_ptr() != address for parameter, address in self.joint):
            raise CompilationError(
                f"weights of {type(model).__name__} that compiled code computes at once have moved in memory, "
                "as by .to() or .data: compile it anew"
            )


def generate(model: nn.Module, captured: Captured, settings: CompilationConfig, size: int | None = None) -> Code:
    """Run passes over a captured graph, in place, lower it, and have a backend make code of it.

    Args:
        model: which was captured.
        captured: the graph.
        settings: which passes run, which backend does, and where graphs are written to.
        size: of the batch, where the graph is for one only.

    Raises:
        CompilationError: a pass breaks the graph, or the backend fails.
        ConfigError: a setting names no pass, no backend, or no folder that can be written to.
    """
    graph, folder = captured.module, Path(settings.dump_graphs) if settings.dump_graphs else None
    full = settings.mode == CompilationMode.FULL
    passes = passes_of(settings.user_passes, settings.pass_config) if full else []
    if size is not None and folder is not None:
        folder = folder / f"size-{size}"
    reports = run_passes(passes, graph, model, folder, ALL_SIZES if size is None else range(size, size + 1))
    parameters = [part for node in graph.graph.nodes for part in node.meta.get(PARTS, ())]
    lowered, lowerings = lower(graph)
    joint = tuple((parameter, parameter.data_ptr()) for parameter in parameters)
    return Code(graph, reports, lowerings, built(lowered, settings.backend or "inductor"), joint)
