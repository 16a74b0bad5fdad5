"""``Pieces``: a graph cut into pieces with code, which run one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.compilation.backends import Runner
from opgraft.compilation.lowering import lower
from opgraft.compilation.nodes import attribute_of
from opgraft.compilation.splitting import Piece, split
from opgraft.compilation.static_graph import ReplayedCode, expect_recordable
from torch import Tensor, fx


@dataclass(frozen=True)
class _Part:
    """The code of a piece. Places are those of a list with all values of a call.

    Attributes:
        run: the code.
        inputs: the places of the arguments.
        outputs: the places of the results.
        last_read: the places without a later reader.
    """

    run: Runner
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_read: tuple[int, ...]


class Pieces:
    """A graph in pieces, called with the tensors of the placeholders.

    Args:
        graph: the graph, with semantic nodes.
        cuts: the operators to cut at.
        build: makes code of a lowered graph.
        batch: the name of the size of the batch.
        sizes: the sizes of the batch with static graphs. Cuts have none.

    Attributes:
        pieces: the pieces in order.
        forms: the number of lowered nodes by the name of the form.
        num_compiled: the number of compiled pieces. Equal pieces count as one.

    Raises:
        CompilationError: a static graph cannot record a piece.
        ConfigError: there is no such operator.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        cuts: Sequence[str],
        build: Callable[[fx.GraphModule], Runner],
        batch: str = "",
        sizes: Sequence[int] = (),
    ) -> None:
        self.pieces = split(graph, cuts)
        self.forms: Counter[str] = Counter()
        self.replayed: list[ReplayedCode] = []
        made: dict[str, tuple[Runner, Counter[str]]] = {}
        runs: list[Runner] = []
        for piece in self.pieces:
            # Equal pieces share code. A cut runs as it is.
            if piece.key not in made:
                lowered, forms = lower(piece.module)
                code = lowered if piece.cut else build(lowered)
                made[piece.key] = (code, forms)
            run, forms = made[piece.key]
            self.forms += forms
            if sizes and not piece.cut:
                expect_recordable(piece.module)
                run = ReplayedCode(run, piece.module, batch, sizes)
                self.replayed.append(run)
            runs.append(run)
        self.num_compiled = len({piece.key for piece in self.pieces if not piece.cut})
        self._place(graph, runs)

    def _place(self, graph: fx.GraphModule, runs: Sequence[Runner]) -> None:
        """Give each exchanged tensor a place among the values of a call."""
        *nodes, end = graph.graph.nodes
        self._given = [node for node in nodes if node.op == "placeholder"]
        held = [node for node in nodes if node.op == "get_attr"]
        made = [node for piece in self.pieces for node in piece.outputs]
        exchanged = [*self._given, *held, *made]
        places = {node: place for place, node in enumerate(exchanged)}

        # Weights are the same in each call.
        self._values: list[Any] = [None] * len(exchanged)
        for node in held:
            self._values[places[node]] = attribute_of(graph, node)

        results = end.args[0]
        self._constants = [each for each in results if not isinstance(each, fx.Node)]
        self._returned = [_place_among(each, places) for each in results]
        kept = {*self._returned, *map(places.__getitem__, held)}
        self._parts = _parts_of(self.pieces, runs, places, kept)

    def __call__(self, *tensors: Tensor) -> list[Any]:
        values = [*tensors, *self._values[len(self._given) :]]
        for part in self._parts:
            inputs = [values[place] for place in part.inputs]
            results = part.run(*inputs)
            for place, result in zip(part.outputs, results, strict=True):
                values[place] = result
            # The memory of a value without a later reader serves the next pieces.
            for place in part.last_read:
                values[place] = None
        constants = iter(self._constants)
        return [next(constants) if place is None else values[place] for place in self._returned]


def _parts_of(
    pieces: Sequence[Piece],
    runs: Sequence[Runner],
    places: Mapping[fx.Node, int],
    kept: Collection[int | None],
) -> list[_Part]:
    """Return the code of pieces, with the places of arguments and results.

    Args:
        pieces: the pieces in order.
        runs: the code of each piece.
        places: the place of each exchanged tensor.
        kept: the places that keep their values until the end of a call.
    """
    parts: list[_Part] = []
    read_later = {*kept}
    # From the last piece to the first: the first reader met here is the last reader in a call.
    for piece, run in reversed([*zip(pieces, runs, strict=True)]):
        inputs = tuple(places[node] for node in piece.inputs)
        outputs = tuple(places[node] for node in piece.outputs)
        last_read = tuple({*inputs} - read_later)
        parts.append(_Part(run, inputs, outputs, last_read))
        read_later.update(inputs)
    return parts[::-1]


def _place_among(result: Any, places: Mapping[fx.Node, int]) -> int | None:
    # A constant has no place.
    return places[result] if isinstance(result, fx.Node) else None
