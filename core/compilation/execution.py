"""Execution otherwise than as one function: a graph in pieces, and static graphs of pieces or of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from opgraft.compilation.backends import Runner
from opgraft.compilation.capture import CapturedGraph
from opgraft.compilation.graph_pass import ALL_SIZES
from opgraft.compilation.lowering import lower
from opgraft.compilation.pieces import Pieces
from opgraft.compilation.static_graph import ReplayedCode, expect_recordable
from opgraft.config import CompilationConfig
from opgraft.errors import CompilationError
from opgraft.registry.decision import Candidate, Decision
from torch import Tensor, fx


class Execution(NamedTuple):
    """The code of a graph that runs in pieces or from static graphs.

    Attributes:
        run: called with the tensors of the placeholders.
        forms: by the name of a form how many of its nodes were lowered.
        recorded: sizes of the batch that have static graphs.
        decision: how many pieces and graphs there are, and by which settings.
    """

    run: Runner
    forms: Mapping[str, int]
    recorded: tuple[int, ...]
    decision: Decision


def executed(
    captured: CapturedGraph,
    settings: CompilationConfig,
    build: Callable[[fx.GraphModule], Runner],
    sizes: range = ALL_SIZES,
) -> Execution:
    """Make code of a graph in which all passes have run.

    Args:
        captured: the graph.
        settings: where it is cut, and what is recorded.
        build: makes code of a lowered graph.
        sizes: of the batch, for which the graph is; static graphs are recorded of one for any size.

    Raises:
        CompilationError: the backend fails, or something cannot be recorded, or be in pieces.
        ConfigError: there is no such backend or operator, or not one dynamic size, while graphs are to be recorded.
    """
    recorded = settings.recorded_sizes if sizes == ALL_SIZES else ()
    batch = ""
    if recorded:
        batch = captured.signature.batch("graph_mode")
        captured.signature.expect_within("capture_sizes", recorded)
    _expect_tensors(captured.module)
    whole = settings.graph_mode == "full"
    by: tuple[Candidate, ...] = ()
    if whole and not settings.cuts:
        lowered, forms = lower(captured.module)
        told, run = "one piece", build(lowered)
    else:
        pieces = Pieces(captured.module, settings.cuts, build, batch, () if whole else recorded)
        run, forms = pieces, pieces.forms
        told = f"{len(pieces.pieces)} pieces, and code for {pieces.num_compiled}, as others are equal or cuts"
        by = _cuts(settings.cuts, pieces)
    if whole and recorded:
        expect_recordable(captured.module)
        run = ReplayedCode(run, captured.module, batch, recorded)
    reason = (
        f"recorded for batches of {', '.join(map(str, recorded))}"
        if recorded
        else "nothing is recorded"
    )
    setting = "compilation_config.graph_mode" if recorded else "compilation_config.splitting_ops"
    decision = Decision("execution of the graph", told, reason, by, setting)
    return Execution(_copied(run) if recorded else run, forms, recorded, decision)


def _expect_tensors(module: fx.GraphModule) -> None:
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    if any(not isinstance(node.meta["val"], Tensor) for node in end.all_input_nodes):
        raise CompilationError(
            "compilation_config.splitting_ops or graph_mode is set, and the model returns the size of a tensor, while "
            "pieces exchange tensors only, and a recording has one size: leave both out, or have it return tensors"
        )


def _cuts(names: Sequence[str], pieces: Pieces) -> tuple[Candidate, ...]:
    counts = Counter(piece.cut for piece in pieces.pieces)
    reasons = {
        name: f"{counts[name]} cuts" if counts[name] else "the graph does not call it"
        for name in names
    }
    return tuple(Candidate(name, bool(counts[name]), reason) for name, reason in reasons.items())


def _copied(run: Runner) -> Runner:
    """Return code whose results no later call writes to; threads take turns, as all write to the same memory."""
    turn = Lock()

    def copied(*tensors: Tensor) -> list[Any]:
        with turn:
            return [each.clone() if isinstance(each, Tensor) else each for each in run(*tensors)]

    return copied
