"""Execute a graph in pieces, or from static graphs of the pieces or of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from opgraft.compilation.backends import Runner
from opgraft.compilation.capture import CapturedGraph
from opgraft.compilation.graph_pass import ALL_SIZES
from opgraft.compilation.lowering import lower
from opgraft.compilation.nodes import OPERATOR
from opgraft.compilation.pieces import Pieces
from opgraft.compilation.static_graph import ReplayedCode, expect_recordable
from opgraft.config import CompilationConfig
from opgraft.errors import CompilationError, ConfigError, close_matches
from opgraft.registry.decision import Candidate, Decision
from torch import Tensor, fx


class Execution(NamedTuple):
    """The code of a graph in pieces or static graphs.

    Attributes:
        run: takes the tensors of the placeholders.
        forms: the number of lowered nodes by name of the form.
        recorded: the sizes of the batch with static graphs.
        decision: the record of the pieces and static graphs, with the settings.
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
    """Make code of a graph after all passes.

    Args:
        captured: the graph.
        settings: name the operators to cut at, and the sizes with static graphs.
        build: makes code of a lowered graph.
        sizes: the sizes of the batch for this graph. Only the graph for any size has static graphs.

    Raises:
        CompilationError: the backend fails, or the graph cannot be recorded or cut.
        ConfigError: there is no such backend or operator, or the graph does not call the operator;
            or static graphs are wanted, and the graph has no dynamic size or several.
    """
    recorded = settings.recorded_sizes if sizes == ALL_SIZES else ()
    batch = _recorded_batch(captured, recorded)
    _expect_tensors(captured.module)

    is_whole = settings.graph_mode == "full"
    by: tuple[Candidate, ...] = ()
    run: Runner
    if is_whole and not settings.cuts:
        told = "one piece"
        lowered, forms = lower(captured.module)
        run = build(lowered)
    else:
        # A graph that is recorded whole has no recorded pieces.
        piecewise = () if is_whole else recorded
        pieces = Pieces(captured.module, settings.cuts, build, batch, piecewise)
        run = pieces
        forms = pieces.forms
        by = _cuts(settings.cuts, pieces)
        # Without the setting, the cuts are those of any model, and some need not occur in this one.
        if settings.splitting_ops is not None:
            _expect_cuts(by, captured.module)
        told = _in_words(pieces)
    if is_whole and recorded:
        expect_recordable(captured.module)
        run = ReplayedCode(run, captured.module, batch, recorded)

    if recorded:
        run = _copied(run)
    return Execution(run, forms, recorded, _decision(told, by, recorded))


def _in_words(pieces: Pieces) -> str:
    number = len(pieces.pieces)
    return f"{number} pieces, and code for {pieces.num_compiled}, as others are equal or cuts"


def _recorded_batch(captured: CapturedGraph, recorded: Sequence[int]) -> str:
    """Return the name of the dynamic size to record; empty if nothing is recorded.

    Raises:
        ConfigError: the graph has no dynamic size or several, or excludes a recorded size.
    """
    if not recorded:
        return ""
    batch = captured.signature.batch("graph_mode")
    captured.signature.expect_within("capture_sizes", recorded)
    return batch


def _decision(told: str, by: tuple[Candidate, ...], recorded: Sequence[int]) -> Decision:
    """Return the record of the pieces and static graphs."""
    reason = "nothing is recorded"
    setting = "compilation_config.splitting_ops"
    if recorded:
        reason = f"recorded for batches of {', '.join(map(str, recorded))}"
        setting = "compilation_config.graph_mode"
    return Decision("execution of the graph", told, reason, by, setting)


def _expect_tensors(module: fx.GraphModule) -> None:
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    if any(not isinstance(node.meta["val"], Tensor) for node in end.all_input_nodes):
        raise CompilationError(
            "compilation_config.splitting_ops or graph_mode is set, and the model returns the size "
            "of a tensor, while pieces exchange tensors only, and a recording has one size: leave "
            "both out, or have it return tensors"
        )


def _cuts(names: Sequence[str], pieces: Pieces) -> tuple[Candidate, ...]:
    """Return a row for each operator to cut at, with the number of cuts."""
    counts = Counter(piece.cut for piece in pieces.pieces)
    rows = []
    for name in dict.fromkeys(names):
        count = counts[name]
        reason = f"{count} cuts" if count else "the graph does not call it"
        rows.append(Candidate(name, bool(count), reason))
    return tuple(rows)


def _expect_cuts(cuts: Sequence[Candidate], module: fx.GraphModule) -> None:
    """Check that the graph calls each operator to cut at.

    Raises:
        ConfigError: the graph does not call one of them. The message names close ones.
    """
    missing = next((cut.name for cut in cuts if not cut.accepted), None)
    if missing is None:
        return
    called = set()
    for node in module.graph.nodes:
        if isinstance(node.target, OPERATOR):
            called.add(node.target.name().partition(".")[0])
    raise ConfigError(
        f"compilation_config.splitting_ops has {missing!r}, and the graph does not call it: "
        f"{close_matches(missing, called)} Leave the name out; or, if a pass has joined the "
        "operator with others, turn the pass off by compilation_config.pass_config"
    )


def _copied(run: Runner) -> Runner:
    """Return the code with a copy of each result, one call at a time.

    Static graphs write the results of each call to the same memory.
    """
    turn = Lock()

    def copied(*tensors: Tensor) -> list[Any]:
        with turn:
            return [each.clone() if isinstance(each, Tensor) else each for each in run(*tensors)]

    return copied
