"""Weights of experts as checkpoints have them: a matrix for each expert, or all in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opgraft.errors import WeightError
from opgraft.ops.weights import LoadedTensor, copy_weight
from torch import Tensor

Part = tuple[int, str] | None
"""An expert and which of its matrices: ``"w1"`` the gate, ``"w3"`` up, ``"w2"`` down. ``None``: all of a kind."""

_GATE_UP = {"gate_proj": "w1", "up_proj": "w3", "w1": "w1", "w3": "w3"}
_DOWN = {"down_proj": "w2", "w2": "w2"}


def checkpoint_parts(name: str, experts: Iterable[int]) -> Mapping[str, Part]:
    """Return the names below a layer of experts under which a checkpoint may have a parameter, or parts of it.

    Args:
        name: of the parameter: ``w13_weight``, ``w2_weight``, ``w13_bias`` or ``w2_bias``.
        experts: of this rank, by their numbers in the checkpoint.
    """
    kind, _, last = name.partition("_")
    names, fused = (_GATE_UP, "gate_up_proj") if kind == "w13" else (_DOWN, "down_proj")
    parts: dict[str, Part] = {fused if last == "weight" else f"{fused}_{last}": None}
    for expert in experts:
        parts.update(
            {f"{expert}.{layer}.{last}": (expert, which) for layer, which in names.items()}
        )
    return parts


@dataclass(frozen=True)
class ExpertLoader:
    """Loads the part of experts' weights that a rank has.

    Attributes:
        experts: what stands in each place of this rank, by its number in the checkpoint.
        num_experts: of the checkpoint.
        intermediate_size: of this rank.
        rank: position among the ranks that share each expert.
        ranks: how many they are.
        interleaved: rows of gate and up come in turn.
        transposed: checkpoints have the weights of all experts in one as ``[experts, in, out]``.
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
        """Load a parameter of that name, or the part of it that is meant.

        Args:
            name: ``w13_…`` or ``w2_…``.
            param: a place for each of ``experts``.
            loaded: of all experts of the checkpoint, or of one.
            part: which.
            unit: inputs of ``w2`` that one element of its last dimensions stands for.

        Raises:
            WeightError: what is loaded has another shape.
        """
        if part is not None:
            for place, expert in enumerate(self.experts):
                if expert == part[0]:
                    self._load(name, param.data[place], loaded, part[1], unit)
        elif self.experts == tuple(range(self.num_experts)):
            self._load(name, param.data, loaded, None, unit)
        else:
            self._expect(loaded, param.data, 0, self.num_experts)
            for place, expert in enumerate(self.experts):
                self._load(
                    name, param.data.narrow(0, place, 1), loaded.narrow(0, expert, 1), None, unit
                )

    def _load(
        self, name: str, target: Tensor, loaded: LoadedTensor, which: str | None, unit: int
    ) -> None:
        """Load experts in one, or a matrix of one expert."""
        is_bias, rows = name.endswith("_bias"), int(which is None)
        transposed = self.transposed and which is None and not is_bias
        if name.startswith("w13"):
            self._load_gate_up(target, loaded, which, rows, transposed)
        elif is_bias:
            self._load_once(target, loaded)
        else:
            size, dim = self.intermediate_size // unit, rows + (not transposed)
            self._expect(loaded, target, dim, size * self.ranks)
            _copy(target, loaded.narrow(dim, self.rank * size, size), transposed, self.what)

    def _load_gate_up(
        self, target: Tensor, loaded: LoadedTensor, which: str | None, dim: int, transposed: bool
    ) -> None:
        """Load rows ``dim``, which checkpoints may have as the last dimension."""
        size, first = self.intermediate_size, self.rank * self.intermediate_size
        total = size * self.ranks
        if which is not None:
            second = which == "w3"
            half = target[second::2] if self.interleaved else target.narrow(0, second * size, size)
            pieces = [(half, first, size)]
        elif self.interleaved:
            pieces = [(target, 2 * first, 2 * size)]
        else:
            pieces = [(target.narrow(dim, n * size, size), n * total + first, size) for n in (0, 1)]
        on_disk = dim + transposed
        self._expect(loaded, target, on_disk, total if which is not None else 2 * total)
        for piece, start, length in pieces:
            _copy(piece, loaded.narrow(on_disk, start, length), transposed, self.what)

    def _load_once(self, target: Tensor, loaded: LoadedTensor) -> None:
        """Load what the sum over the ranks has once."""
        if self.rank:
            target.zero_()
        else:
            copy_weight(target, loaded, self.what)

    def _expect(self, loaded: LoadedTensor, target: Tensor, dim: int, size: int) -> None:
        if len(loaded.shape) != target.dim() or loaded.shape[dim] != size:
            raise WeightError.of_shape(
                self.what, loaded.shape, f"{size} in dimension {dim} of {target.dim()}"
            )


def _copy(target: Tensor, loaded: Any, transposed: bool, what: str) -> None:
    copy_weight(target, loaded[...].transpose(1, 2) if transposed else loaded, what)
