"""Code: what a captured graph becomes by passes, lowering and a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opgraft.compilation.backends import Runner, built
from opgraft.compilation.capture import Captured
from opgraft.compilation.execution import Execution, executed
from opgraft.compilation.graph_pass import PassReport
from opgraft.compilation.lowering import Lowering, lower, lowerings_of
from opgraft.compilation.manager import ALL_SIZES, run_passes
from opgraft.compilation.nodes import PARTS, Origin, attribute_of
from opgraft.compilation.packages import Packages
from opgraft.compilation.passes import passes_of
from opgraft.compilation.tensors import origins_of
from opgraft.config import CompilationConfig, CompilationMode
from opgraft.decision import Decision
from opgraft.errors import CacheEntryError, CompilationError
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Packaged:
    """Code that is in a package of the cache.

    Attributes:
        key: of the package.
        origins: of the tensors of the graph.
        values: those of them that no model has.
    """

    key: str
    origins: Mapping[str, Origin]
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class Code:
    """A graph, and the function that runs it.

    Attributes:
        graph: what was captured, after all passes, with semantic nodes; ``None`` of code that was in the cache.
        passes: the record of each, in order.
        lowerings: for each form what its nodes have become.
        run: called with the tensors of the placeholders.
        tensors: of the model, with which it computes.
        joint: parameters over whose memory the graph has joint tensors, each with its address.
        packaged: what is known of the package that it was written to; of one function, and only where it has one.
        execution: the pieces and static graphs that ``run`` consists of; ``None`` where it is one function.
        unkept: why some of it is in no package, where packages were asked for.
    """

    graph: fx.GraphModule | None
    passes: tuple[PassReport, ...]
    lowerings: tuple[Lowering, ...]
    run: Runner
    tensors: tuple[Tensor, ...]
    joint: tuple[tuple[nn.Parameter, int], ...]
    packaged: Packaged | None = None
    execution: Execution | None = None
    unkept: str = ""

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes of the batch that have static graphs, and one that is padded."""
        sizes = self.execution.recorded if self.execution else ()
        padded = next((size - 1 for size in sizes if size - 1 not in (0, *sizes)), None)
        return sizes if padded is None else (*sizes, padded)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Tell for each form what its nodes have become, and how the graph runs."""
        lowerings = (each.decision for each in self.lowerings)
        return (*lowerings, *((self.execution.decision,) if self.execution else ()))

    def expect_unmoved(self, model: nn.Module) -> None:
        """Raise ``CompilationError`` where parameters of ``joint`` lie elsewhere now."""
        if any(parameter.data_ptr() != address for parameter, address in self.joint):
            raise CompilationError(
                f"weights of {type(model).__name__} that compiled code computes at once have moved in memory, "
                "as by .to() or .data: compile it anew"
            )


def generate(
    model: nn.Module,
    captured: Captured,
    settings: CompilationConfig,
    sizes: range = ALL_SIZES,
    packages: Packages | None = None,
) -> Code:
    """Run passes over a captured graph, in place, lower it, and have a backend make code of it.

    Args:
        model: which was captured.
        captured: the graph.
        settings: which passes run, which backend does, and where graphs are written to.
        sizes: of the batch, for which the graph is.
        packages: where the code is to be written to; what cannot be is made in memory.

    Raises:
        CompilationError: a pass breaks the graph, or the backend fails.
        ConfigError: a setting names no pass, no backend, or no folder that can be written to.
    """
    graph, folder = captured.module, Path(settings.dump_graphs) if settings.dump_graphs else None
    full = settings.mode == CompilationMode.FULL
    passes = passes_of(settings.user_passes, settings.pass_config) if full else []
    if sizes != ALL_SIZES and folder is not None:
        folder = folder / (f"size-{sizes[0]}" if len(sizes) == 1 else f"sizes-{sizes[0]}-{sizes[-1]}")
    reports = run_passes(passes, graph, model, folder, sizes)
    parameters = [part for node in graph.graph.nodes for part in node.meta.get(PARTS, ())]
    joint = tuple((parameter, parameter.data_ptr()) for parameter in parameters)
    tensors = (*(attribute_of(graph, node) for node in graph.graph.nodes if node.op == "get_attr"), *parameters)
    keys, unkept = list[str](), list[str]()

    def build(lowered: fx.GraphModule) -> Runner:
        if packages is not None:
            try:
                keys.append(packages.key_of(lowered, sizes))
                return packages.runner_of(keys[-1], lowered)
            except CacheEntryError as error:
                unkept.append(str(error))
        return built(lowered, str(settings.backend))

    if settings.executed_otherwise:
        execution = executed(captured, settings, build, sizes)
        lowerings, why = lowerings_of(execution.forms), "".join(unkept[:1])
        return Code(graph, reports, lowerings, execution.run, tensors, joint, execution=execution, unkept=why)
    lowered, forms = lower(graph)
    run = build(lowered)
    packaged = _packaged(model, lowered, keys[0]) if keys and not unkept else None
    return Code(graph, reports, lowerings_of(forms), run, tensors, joint, packaged, unkept="".join(unkept))


def _packaged(model: nn.Module, lowered: fx.GraphModule, key: str) -> Packaged:
    origins = origins_of(model, lowered)
    tensors = {str(n.target): attribute_of(lowered, n) for n in lowered.graph.nodes if n.op == "get_attr"}
    values = {name: tensors[name] for name, origin in origins.items() if origin[0] == "value"}
    return Packaged(key, origins, values)
