"""Weights of experts as checkpoints have them: a matrix for each expert, or all in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opgraft.errors import WeightError
from opgraft.ops.weights import LoadedTensor, copy_weight
from torch import Tensor

Part = tuple[int, str] | None
"""An expert and which of its matrices: ``"w1"`` the gate, ``"w3"`` up, ``"w2"`` down. ``None``: all of a kind."""

_GATE_UP = {"gate_proj": "w1", "up_proj": "w3", "w1": "w1", "w3": "w3"}
_DOWN = {"down_proj": "w2", "w2": "w2"}


def checkpoint_parts(name: str, num_experts: int) -> Mapping[str, Part]:
    """Return the names below a layer of experts under which a checkpoint may have a parameter, or parts of it.

    Args:
        name: of the parameter: ``w13_weight``, ``w2_weight``, ``w13_bias`` or ``w2_bias``.
        num_experts: of the checkpoint.
    """
    kind, _, last = name.partition("_")
    names, fused = (_GATE_UP, "gate_up_proj") if kind == "w13" else (_DOWN, "down_proj")
    parts: dict[str, Part] = {fused if last == "weight" else f"{fused}_{last}": None}
    for expert in range(num_experts):
        parts.update({f"{expert}.{layer}.{last}": (expert, which) for layer, which in names.items()})
    return parts


@dataclass(frozen=True)
class ExpertLoader:
    """Loads the part of experts' weights that a rank has.

    Attributes:
        intermediate_size: of this rank.
        rank: position among the ranks that share each expert.
        ranks: how many they are.
        interleaved: rows of gate and up come in turn.
        transposed: checkpoints have the weights of all experts in one as ``[experts, in, out]``.
        what: the layer as messages call it.
    """

    intermediate_size: int
    rank: int
    ranks: int
    interleaved: bool
    transposed: bool
    what: str

    def load(self, name: str, param: Tensor, loaded: LoadedTensor, part: Part = None) -> None:
        """Load a parameter of that name, or the part of it that is meant.

        Raises:
            WeightError: what is loaded has another shape.
        """
        target = param.data if part is None else param.data[part[0]]
        is_bias = name.endswith("_bias")
        transposed = self.transposed and part is None and not is_bias
        if name.startswith("w13"):
            self._load_gate_up(
                target, loaded, None if part is None else part[1], target.dim() - 2 + is_bias, transposed
            )
        elif is_bias:
            self._load_once(target, loaded)
        else:
            size = self.intermediate_size
            dim = target.dim() - (2 if transposed else 1)
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
            raise WeightError.of_shape(self.what, loaded.shape, f"{size} in dimension {dim} of {target.dim()}")


def _copy(target: Tensor, loaded: Any, transposed: bool, what: str) -> None:
    copy_weight(target, loaded[...].transpose(1, 2) if transposed else loaded, what)
