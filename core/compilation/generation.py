"""Code of captured graphs, by passes, lowering and a backend: what takes a cache away, with all that it imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opgraft.compilation.backends import Runner, built
from opgraft.compilation.capture import DYNAMO, WAYS, CapturedGraph, capture
from opgraft.compilation.code import Code, Packaged
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
from torch import fx, nn


def codes_of(
    model: nn.Module,
    example: Example,
    settings: CompilationConfig,
    packages: Packages | None,
    most_passes: int | None = None,
) -> tuple[CapturedGraph, dict[range, Code]]:
    """Capture a model, and generate code for any size of the batch, for ``compile_sizes`` and for ranges.

    Args:
        model: in evaluation mode.
        example: a call of the model.
        settings: of compilation.
        packages: as ``generate`` takes them.
        most_passes: run so many passes only, the first of all; by default all.

    Raises:
        CompilationError: the model cannot be captured; or as ``generate``.
        ConfigError: sizes are asked for that the graph cannot have; or as ``generate``.
    """
    ways = WAYS if settings.mode is CompilationMode.FULL else (DYNAMO,)
    captured = capture(model, example, ways)
    passes = passes_to_run(settings)[:most_passes]
    codes = {ALL_SIZES: generate(model, captured, settings, passes, packages=packages)}
    for sizes in (*(range(size, size + 1) for size in settings.compile_sizes), *settings.ranges):
        sized = capture(model, _of_sizes(example, captured.signature, sizes), ways)
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


def generate(
    model: nn.Module,
    captured: CapturedGraph,
    settings: CompilationConfig,
    passes: Sequence[GraphPass],
    sizes: range = ALL_SIZES,
    packages: Packages | None = None,
) -> Code:
    """Run passes over a captured graph, in place, lower it, and have a backend make code of it.

    Args:
        model: which was captured.
        captured: the graph.
        settings: which backend runs, and where graphs are written to.
        passes: in their order.
        sizes: of the batch, for which the graph is.
        packages: where the code is to be written to; what cannot be is made in memory.

    Raises:
        CompilationError: a pass breaks the graph, or the backend fails.
        ConfigError: a setting names no backend, or no folder that can be written to.
    """
    graph, folder = captured.module, Path(settings.dump_graphs) if settings.dump_graphs else None
    if sizes != ALL_SIZES and folder is not None:
        folder = folder / (
            f"size-{sizes[0]}" if len(sizes) == 1 else f"sizes-{sizes[0]}-{sizes[-1]}"
        )
    reports = run_passes(passes, graph, model, folder, sizes)
    joint = tuple(part for node in graph.graph.nodes for part in node.meta.get(PARTS, ()))
    move_joint(joint)
    tensors = (
        *(attribute_of(graph, node) for node in graph.graph.nodes if node.op == "get_attr"),
        *joint,
    )
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
        return Code(
            graph,
            reports,
            lowerings,
            execution.run,
            tensors,
            joint,
            execution=execution,
            unkept=why,
        )
    lowered, forms = lower(graph)
    run = build(lowered)
    packaged = _packaged(model, lowered, keys[0]) if keys and not unkept else None
    return Code(
        graph, reports, lowerings_of(forms), run, tensors, joint, packaged, unkept="".join(unkept)
    )


def _packaged(model: nn.Module, lowered: fx.GraphModule, key: str) -> Packaged:
    origins = origins_of(model, lowered)
    tensors = {
        str(n.target): attribute_of(lowered, n) for n in lowered.graph.nodes if n.op == "get_attr"
    }
    values = {name: tensors[name] for name, origin in origins.items() if origin[0] == "value"}
    return Packaged(key, origins, values)


def _of_sizes(example: Example, signature: Signature, sizes: range) -> Example:
    """Return an example of some sizes of the batch, and of no other.

    Raises:
        ConfigError: the graph has not exactly one dynamic size, or it cannot be this one.
    """
    if len(sizes) == 1:
        signature.expect_within("compile_sizes", sizes)
    batch = signature.batch("compile_ranges")
    flat = signature.flat(example.args, example.kwargs)
    size = sizes[0] if len(sizes) == 1 else max(sizes[0], 2)  # compilers take 1 for a constant
    cut = of_sizes([flat[place] for place in signature.inputs], signature.expected, {batch: size})
    args, kwargs = signature.filled(flat, cut)
    return (
        Example(args, kwargs, ())
        if len(sizes) == 1
        else Example(args, kwargs, example.dynamic_shapes, sizes)
    )
