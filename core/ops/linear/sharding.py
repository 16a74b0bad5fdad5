"""Cutting weights for ranks: which part of a loaded weight goes where in a parameter.

A parameter says by its attributes how it is cut; those that ``create_weights`` sets:

- ``output_dim`` and ``input_dim``: the dimensions along the layer's output and input. Without one, it is not cut.
- ``packed_dim`` and ``packed_factor``: along that dimension, one element holds so many numbers.
- ``output_unit`` and ``input_unit``: along that dimension, one element is for so many numbers, as scales of blocks are.
- ``needs_scalar_to_array``: it has one number for each layer that a merged layer stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.errors import LayerError, WeightError
from opgraft.ops.weights import LoadedTensor, copy_weight
from torch import Tensor


@dataclass(frozen=True)
class OutputShard:
    """The rows of one layer that this rank has, in a parameter that may hold rows of several layers.

    Attributes:
        index: of the layer among those that a merged layer stands for.
        offset: of the first row in the parameter.
        start: of the first row in the layer's whole weight.
        size: number of rows.
        total: number of rows of the layer's whole weight.
    """

    index: int
    offset: int
    start: int
    size: int
    total: int


@dataclass(frozen=True)
class InputShard:
    """The columns of a layer that this rank has.

    Attributes:
        start: of the first one in the layer's whole weight.
        size: number of columns.
        total: number of columns of the layer's whole weight.
    """

    start: int
    size: int
    total: int


def divide(number: int, ranks: int, what: str) -> int:
    """Divide evenly.

    Raises:
        LayerError: there is a remainder.
    """
    if number % ranks:
        raise LayerError(
            f"{what} is {number}, which {ranks} tensor-parallel ranks do not divide: choose a number of ranks that does"
        )
    return number // ranks


def load_rows(
    param: Tensor, loaded: LoadedTensor, shard: OutputShard, what: str, on_disk: int = 0
) -> None:
    """Load this rank's rows of one layer; ``on_disk``: the first row of that layer in ``loaded``.

    Raises:
        WeightError: the weight that is loaded has another shape, or its blocks cross the border of the rank's rows.
    """
    dim: int | None = getattr(param, "output_dim", None)
    if dim is None:
        target = (
            param.data[shard.index]
            if getattr(param, "needs_scalar_to_array", False)
            else param.data
        )
        copy_weight(target, loaded, what)
        return
    if not len(loaded.shape):  # one scale for all rows
        copy_weight(param.data, loaded, what)
        return
    unit = _unit(param, dim, "output_unit")
    size = _parts(shard.size, unit)
    whole = shard.size == shard.total
    if any(
        number % unit for number in (shard.offset, on_disk, shard.start, 0 if whole else shard.size)
    ):
        raise _crossing(
            what, f"rows {shard.start} to {shard.start + shard.size - 1} of a layer", unit
        )
    target = param.data.narrow(dim, shard.offset // unit, size)
    copy_weight(target, loaded.narrow(dim, (on_disk + shard.start) // unit, size), what)


def expect_rows(param: Tensor, loaded: LoadedTensor, rows: int, what: str) -> None:
    """Raise ``WeightError`` unless a weight has so many rows along the layer's output."""
    dim: int | None = getattr(param, "output_dim", None)
    if dim is None or not len(loaded.shape):
        return
    expected = _parts(rows, _unit(param, dim, "output_unit"))
    if len(loaded.shape) != param.dim() or loaded.shape[dim] != expected:
        raise WeightError.of_shape(
            what, loaded.shape, f"{expected} in dimension {dim} of {param.dim()}"
        )


def load_columns(param: Tensor, loaded: LoadedTensor, shard: InputShard, what: str) -> None:
    """Load this rank's columns, those along the layer's input.

    Raises:
        WeightError: the weight that is loaded has another shape, or its blocks cross the border of the rank's columns.
    """
    dim: int | None = getattr(param, "input_dim", None)
    if dim is not None and len(loaded.shape):
        unit = _unit(param, dim, "input_unit")
        if shard.size < shard.total and (shard.start % unit or shard.size % unit):
            raise _crossing(what, f"columns {shard.start} to {shard.start + shard.size - 1}", unit)
        expected = _parts(shard.total, unit)
        if len(loaded.shape) != param.dim() or loaded.shape[dim] != expected:
            raise WeightError.of_shape(
                what, loaded.shape, f"{expected} in dimension {dim} of {param.dim()}"
            )
        loaded = loaded.narrow(dim, shard.start // unit, _parts(shard.size, unit))
    copy_weight(param.data, loaded, what)


def _crossing(what: str, part: str, unit: int) -> WeightError:
    return WeightError(
        f"{what}: this rank has {part}, but the checkpoint has one number for each {unit} of them, which the border of "
        "the part cuts: choose a number of ranks of which each has whole blocks"
    )


def _unit(param: Tensor, dim: int, name: str) -> int:
    if getattr(param, "packed_dim", None) == dim:
        return int(getattr(param, "packed_factor", 1))
    return int(getattr(param, name, 1))


def _parts(size: int, unit: int) -> int:
    return -(-size // unit)
