"""Generate code of captured graphs: run passes, lower, and call a backend.

A model from the cache needs none of this, nor the imports of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opgraft.compilation.backends import Runner, built
from opgraft.compilation.capture import DYNAMO, WAYS, CapturedGraph, capture
from opgraft.compilation.code import Code, PackagedCode
from opgraft.compilation.example import Example
from opgraft.compilation.execution import executed
from opgraft.compilation.graph_pass import ALL_SIZES, GraphPass
from opgraft.compilation.inputs import Signature
from opgraft.compilation.lowering import lower, lowerings_of
from opgraft.compilation.manager import run_passes
from opgraft.compilation.nodes import PARTS, attribute_of
from opgraft.compilation.packages import Packages
from opgraft.compilation.passes import passes_of
from opgraft.compilation.tensors import move_joint, origins_of
from opgraft.compilation.verification import of_sizes
from opgraft.config import CompilationConfig, CompilationMode
from opgraft.errors import CacheEntryError
from torch import Tensor, fx, nn


def codes_of(
    model: nn.Module,
    example: Example,
    settings: CompilationConfig,
    packages: Packages | None,
    most_passes: int | None = None,
) -> tuple[CapturedGraph, dict[range, Code]]:
    """Capture a model, and generate code for any size, for ``compile_sizes`` and for ranges.

    Returns:
        The graph for any size, and the code by sizes of the batch.

    Args:
        model: in evaluation mode.
        example: a call of the model.
        settings: of compilation.
        packages: as ``generate`` takes them.
        most_passes: run so many passes only, the first of all; by default all.

    Raises:
        CompilationError: the model cannot be captured; or as ``generate``.
        ConfigError: settings name sizes outside of the graph's bounds; or as ``generate``.
    """
    ways = WAYS if settings.mode is CompilationMode.FULL else (DYNAMO,)
    captured = capture(model, example, ways)
    passes = passes_to_run(settings)[:most_passes]
    codes = {ALL_SIZES: generate(model, captured, settings, passes, packages=packages)}
    single = [range(size, size + 1) for size in settings.compile_sizes]
    for sizes in (*single, *settings.ranges):
        sized_example = _of_sizes(example, captured.signature, sizes)
        sized = capture(model, sized_example, ways)
        codes[sizes] = generate(model, sized, settings, passes, sizes, packages)
    return captured, codes


def passes_to_run(settings: CompilationConfig) -> list[GraphPass]:
    """Return the passes that run under settings, in their order.

    Raises:
        ConfigError: a setting names no pass.
    """
    if settings.mode != CompilationMode.FULL:
        return []
    return passes_of(settings.user_passes, settings.pass_config)


def _tensors_of(graph: fx.GraphModule) -> tuple[tuple[Tensor, ...], tuple[nn.Parameter, ...]]:
    """Return all tensors of a graph, and the tensors that the graph reads as parts of one."""
    nodes = graph.graph.nodes
    joint = tuple(part for node in nodes for part in node.meta.get(PARTS, ()))
    move_joint(joint)
    held = [attribute_of(graph, node) for node in nodes if node.op == "get_attr"]
    return (*held, *joint), joint


def generate(
    model: nn.Module,
    captured: CapturedGraph,
    settings: CompilationConfig,
    passes: Sequence[GraphPass],
    sizes: range = ALL_SIZES,
    packages: Packages | None = None,
) -> Code:
    """Run passes over a captured graph, lower the graph, and have a backend make code.

    Args:
        model: the captured model.
        captured: the graph, which the passes change in place.
        settings: name the backend, and a folder for graphs.
        passes: the passes, in order.
        sizes: the sizes of the batch for this graph.
        packages: keep the code; without packages, and for code that no package takes, the code is
            made in memory.

    Raises:
        CompilationError: a pass breaks the graph, or the backend fails.
        ConfigError: a setting names an unknown backend, or a folder that refuses files.
    """
    graph = captured.module
    folder = _folder_of_graphs(settings, sizes)
    reports = run_passes(passes, graph, model, folder, sizes)
    tensors, joint = _tensors_of(graph)

    builder = _Builder(str(settings.backend), sizes, packages)
    if settings.executed_otherwise:
        execution = executed(captured, settings, builder.build, sizes)
        return Code(
            graph,
            reports,
            lowerings_of(execution.forms),
            execution.run,
            tensors,
            joint,
            execution=execution,
            unkept=builder.unkept,
        )
    lowered, forms = lower(graph)
    run = builder.build(lowered)
    packaged = None
    if builder.keys and not builder.unkept:
        packaged = _packaged(model, lowered, builder.keys[0])
    lowerings = lowerings_of(forms)
    return Code(graph, reports, lowerings, run, tensors, joint, packaged, unkept=builder.unkept)


class _Builder:
    """Makes code of lowered graphs, from packages if possible.

    Args:
        backend: makes code in memory.
        sizes: the sizes of the batch for all graphs.
        packages: keep the code, if given.

    Attributes:
        keys: the key of each package.
        unkept: the first reason against a package; empty without one.
    """

    def __init__(self, backend: str, sizes: range, packages: Packages | None) -> None:
        self._backend = backend
        self._sizes = sizes
        self._packages = packages
        self.keys: list[str] = []
        self.unkept = ""

    def build(self, lowered: fx.GraphModule) -> Runner:
        """Return the function that runs a lowered graph."""
        if self._packages is not None:
            try:
                key = self._packages.key_of(lowered, self._sizes)
                self.keys.append(key)
                return self._packages.runner_of(key, lowered)
            except CacheEntryError as error:
                self.unkept = self.unkept or str(error)
        return built(lowered, self._backend)


def _folder_of_graphs(settings: CompilationConfig, sizes: range) -> Path | None:
    """Return the folder for the texts of graphs; single sizes and ranges have folders below."""
    if not settings.dump_graphs:
        return None
    folder = Path(settings.dump_graphs)
    if sizes == ALL_SIZES:
        return folder
    name = f"size-{sizes[0]}" if len(sizes) == 1 else f"sizes-{sizes[0]}-{sizes[-1]}"
    return folder / name


def _packaged(model: nn.Module, lowered: fx.GraphModule, key: str) -> PackagedCode:
    """Describe the package of a lowered graph."""
    origins = origins_of(model, lowered)
    values = {}
    for node in lowered.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and origins[name][0] == "value":
            values[name] = attribute_of(lowered, node)
    return PackagedCode(key, origins, values)


def _of_sizes(example: Example, signature: Signature, sizes: range) -> Example:
    """Return an example for some sizes of the batch alone.

    Raises:
        ConfigError: the graph has no dynamic size or several, or other bounds for the size.
    """
    is_single = len(sizes) == 1
    if is_single:
        signature.expect_within("compile_sizes", sizes)
    batch = signature.batch("compile_ranges")
    flat = signature.flat(example.args, example.kwargs)
    # Compilers take a size of 1 for a constant.
    size = sizes[0] if is_single else max(sizes[0], 2)
    tensors = [flat[place] for place in signature.inputs]
    cut = of_sizes(tensors, signature.expected, {batch: size})
    args, kwargs = signature.filled(flat, cut)
    if is_single:
        return Example(args, kwargs, ())
    return Example(args, kwargs, example.dynamic_shapes, sizes)
