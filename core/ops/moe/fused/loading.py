"""Load experts from checkpoints: a matrix for each expert, or one tensor for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opgraft.errors import WeightError
from opgraft.ops.weights import LoadedTensor, copy_weight
from torch import Tensor

Part = tuple[int, str] | None
"""An expert and one of its matrices; ``None`` for the matrices of all experts.

``"w1"`` is the gate, ``"w3"`` up, ``"w2"`` down.
"""

_GATE_UP = MappingProxyType({"gate_proj": "w1", "up_proj": "w3", "w1": "w1", "w3": "w3"})
_DOWN = MappingProxyType({"down_proj": "w2", "w2": "w2"})


def checkpoint_parts(name: str, experts: Iterable[int]) -> Mapping[str, Part]:
    """Return the possible names of a parameter or of its parts in a checkpoint, below the layer.

    For ``w2_weight``: ``down_proj``, ``0.down_proj.weight``, ``0.w2.weight`` and so on.

    Args:
        name: of the parameter: ``w13_weight``, ``w2_weight``, ``w13_bias`` or ``w2_bias``.
        experts: the experts of this rank, by their numbers in the checkpoint.
    """
    kind, _, last = name.partition("_")
    is_gate_up = kind == "w13"
    matrices = _GATE_UP if is_gate_up else _DOWN
    fused = "gate_up_proj" if is_gate_up else "down_proj"
    if last != "weight":
        fused = f"{fused}_{last}"

    parts: dict[str, Part] = {fused: None}
    for expert in experts:
        for layer, matrix in matrices.items():
            parts[f"{expert}.{layer}.{last}"] = (expert, matrix)
    return parts


@dataclass(frozen=True)
class ExpertLoader:
    """Loads this rank's part of the experts' weights.

    Attributes:
        experts: the expert in each place of this rank, by the number in the checkpoint.
        num_experts: the number of experts in the checkpoint.
        intermediate_size: of this rank.
        rank: position among the ranks that share each expert.
        ranks: the number of those ranks.
        interleaved: rows of gate and up come in turn.
        transposed: a checkpoint holds the weights of all experts in one tensor,
            ``[experts, in, out]``.
        what: the layer as messages call it.
    """

    experts: tuple[int, ...]
    num_experts: int
    intermediate_size: int
    rank: int
    ranks: int
    interleaved: bool
    transposed: bool
    what: str

    def load(
        self, name: str, param: Tensor, loaded: LoadedTensor, part: Part = None, unit: int = 1
    ) -> None:
        """Load a parameter, or one part of the parameter.

        Args:
            name: ``w13_…`` or ``w2_…``.
            param: holds an entry for each of ``experts``.
            loaded: the weights of all experts of the checkpoint, or of one.
            part: the expert and the matrix; ``None`` for all.
            unit: the inputs of ``w2`` in one element of the last dimension.

        Raises:
            WeightError: ``loaded`` has another shape.
        """
        if part is not None:
            wanted, matrix = part
            for place, expert in enumerate(self.experts):
                if expert == wanted:
                    self._load(name, param.data[place], loaded, matrix, unit)
            return
        if self.experts == tuple(range(self.num_experts)):
            self._load(name, param.data, loaded, None, unit)
            return

        self._expect_size(loaded, param.data, 0, self.num_experts)
        for place, expert in enumerate(self.experts):
            target = param.data.narrow(0, place, 1)
            self._load(name, target, loaded.narrow(0, expert, 1), None, unit)

    def _load(
        self, name: str, target: Tensor, loaded: LoadedTensor, matrix: str | None, unit: int
    ) -> None:
        """Load one matrix of one expert; without ``matrix``, experts in one tensor."""
        is_bias = name.endswith("_bias")
        is_fused = matrix is None
        # The dimension of rows: behind the dimension of experts, if there is one.
        rows = 1 if is_fused else 0
        is_transposed = self.transposed and is_fused and not is_bias
        if name.startswith("w13"):
            self._load_gate_up(target, loaded, matrix, rows, is_transposed)
        elif is_bias:
            self._load_on_first_rank(target, loaded)
        else:
            size = self.intermediate_size // unit
            inputs = rows if is_transposed else rows + 1
            self._expect_size(loaded, target, inputs, size * self.ranks)
            own = loaded.narrow(inputs, self.rank * size, size)
            _copy(target, own, is_transposed, self.what)

    def _load_gate_up(
        self, target: Tensor, loaded: LoadedTensor, matrix: str | None, rows: int, transposed: bool
    ) -> None:
        """Load this rank's rows of the gate, of up, or of both.

        Args:
            target: the parameter, or one expert of the parameter.
            loaded: from the checkpoint.
            matrix: ``"w1"`` or ``"w3"``; ``None`` for both in one tensor.
            rows: the dimension of ``target`` to cut.
            transposed: in the checkpoint, ``rows`` is the last dimension.
        """
        total = self.ranks * self.intermediate_size
        whole = 2 * total if matrix is None else total
        rows_on_disk = rows + 1 if transposed else rows
        self._expect_size(loaded, target, rows_on_disk, whole)
        for piece, start, length in self._gate_up_pieces(target, matrix, rows):
            own = loaded.narrow(rows_on_disk, start, length)
            _copy(piece, own, transposed, self.what)

    def _gate_up_pieces(
        self, target: Tensor, matrix: str | None, rows: int
    ) -> list[tuple[Tensor, int, int]]:
        """Return parts of ``target``, each with its first row and number of rows in the checkpoint.

        The arguments are as in :meth:`_load_gate_up`.
        """
        size = self.intermediate_size
        first = self.rank * size
        if matrix is None:
            if self.interleaved:
                return [(target, 2 * first, 2 * size)]
            total = self.ranks * size
            gate = target.narrow(rows, 0, size)
            up = target.narrow(rows, size, size)
            return [(gate, first, size), (up, total + first, size)]

        is_up = int(matrix == "w3")
        if self.interleaved:
            return [(target[is_up::2], first, size)]
        return [(target.narrow(0, is_up * size, size), first, size)]

    def _load_on_first_rank(self, target: Tensor, loaded: LoadedTensor) -> None:
        """Load on the first rank and fill with zeros elsewhere, as the sum over ranks adds once."""
        if self.rank:
            target.zero_()
        else:
            copy_weight(target, loaded, self.what)

    def _expect_size(self, loaded: LoadedTensor, target: Tensor, dim: int, size: int) -> None:
        if len(loaded.shape) != target.dim() or loaded.shape[dim] != size:
            expected = f"{size} in dimension {dim} of {target.dim()}"
            raise WeightError.of_shape(self.what, loaded.shape, expected)


def _copy(target: Tensor, loaded: Any, transposed: bool, what: str) -> None:
    # A tensor of a checkpoint cannot be transposed until read.
    source = loaded[...].transpose(1, 2) if transposed else loaded
    copy_weight(target, source, what)
