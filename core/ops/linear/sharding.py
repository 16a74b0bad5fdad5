"""Load a rank's part of a weight into a parameter.

``create_weights`` sets attributes of a parameter:

- ``output_dim`` and ``input_dim``: the dimensions along the layer's output and input. Without the
  attribute, a parameter is not cut along output or input.
- ``packed_dim`` and ``packed_factor``: along that dimension, one element holds so many numbers.
- ``output_unit`` and ``input_unit``: one element serves so many outputs or inputs, as the scale of
  a block.
- ``needs_scalar_to_array``: the parameter has one number for each layer in a merged layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.errors import LayerError, WeightError
from opgraft.ops.weights import LoadedTensor, copy_weight
from torch import Tensor


@dataclass(frozen=True)
class OutputShard:
    """This rank's rows of one layer. A parameter may hold rows of several layers.

    Attributes:
        index: the position of the layer in a merged layer.
        offset: the place of the first row in the parameter.
        start: the place of the first row in the layer's whole weight.
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
    """This rank's columns of a layer.

    Attributes:
        start: the place of the first column in the layer's whole weight.
        size: number of columns.
        total: number of columns of the layer's whole weight.
    """

    start: int
    size: int
    total: int


def divide(number: int, ranks: int, what: str) -> int:
    """Return the share of each rank.

    Raises:
        LayerError: there is a remainder.
    """
    if number % ranks:
        raise LayerError(
            f"{what} is {number}, which {ranks} tensor-parallel ranks do not divide: choose a "
            "number of ranks that does"
        )
    return number // ranks


def load_rows(
    param: Tensor, loaded: LoadedTensor, shard: OutputShard, what: str, on_disk: int = 0
) -> None:
    """Load this rank's rows of one layer.

    Args:
        param: the parameter.
        loaded: the layer's whole weight, or weights of several layers one after another.
        shard: the rows.
        what: the layer as messages call it.
        on_disk: the first row of the layer in ``loaded``.

    Raises:
        WeightError: ``loaded`` has another shape, or a block crosses the border of the rows.
    """
    dim: int | None = getattr(param, "output_dim", None)
    if dim is None:
        one_per_layer = getattr(param, "needs_scalar_to_array", False)
        target = param.data[shard.index] if one_per_layer else param.data
        copy_weight(target, loaded, what)
        return

    # A scale of all rows is the same on every rank.
    if not len(loaded.shape):
        copy_weight(param.data, loaded, what)
        return

    unit = _unit(param, dim, "output_unit")
    _expect_whole_blocks(shard, on_disk, unit, what)
    size = _units(shard.size, unit)
    target = param.data.narrow(dim, shard.offset // unit, size)
    first = (on_disk + shard.start) // unit
    copy_weight(target, loaded.narrow(dim, first, size), what)


def _expect_whole_blocks(shard: OutputShard, on_disk: int, unit: int, what: str) -> None:
    # The last block of a whole layer may be incomplete.
    end = 0 if shard.size == shard.total else shard.size
    borders = (shard.offset, on_disk, shard.start, end)
    if any(border % unit for border in borders):
        last = shard.start + shard.size - 1
        raise _block_error(what, f"rows {shard.start} to {last} of a layer", unit)


def expect_rows(param: Tensor, loaded: LoadedTensor, rows: int, what: str) -> None:
    """Raise ``WeightError`` unless a weight has ``rows`` along the layer's output."""
    dim: int | None = getattr(param, "output_dim", None)
    if dim is not None and len(loaded.shape):
        unit = _unit(param, dim, "output_unit")
        _expect_size(param, loaded, dim, _units(rows, unit), what)


def load_columns(param: Tensor, loaded: LoadedTensor, shard: InputShard, what: str) -> None:
    """Load this rank's columns, along the layer's input.

    Raises:
        WeightError: ``loaded`` has another shape, or a block crosses the border of the columns.
    """
    dim: int | None = getattr(param, "input_dim", None)
    if dim is None or not len(loaded.shape):
        copy_weight(param.data, loaded, what)
        return

    unit = _unit(param, dim, "input_unit")
    is_part = shard.size < shard.total
    if is_part and (shard.start % unit or shard.size % unit):
        last = shard.start + shard.size - 1
        raise _block_error(what, f"columns {shard.start} to {last}", unit)

    _expect_size(param, loaded, dim, _units(shard.total, unit), what)
    size = _units(shard.size, unit)
    copy_weight(param.data, loaded.narrow(dim, shard.start // unit, size), what)


def _expect_size(param: Tensor, loaded: LoadedTensor, dim: int, size: int, what: str) -> None:
    if len(loaded.shape) != param.dim() or loaded.shape[dim] != size:
        expected = f"{size} in dimension {dim} of {param.dim()}"
        raise WeightError.of_shape(what, loaded.shape, expected)


def _block_error(what: str, part: str, unit: int) -> WeightError:
    return WeightError(
        f"{what}: this rank has {part}, but the checkpoint has one number for each {unit} of them, "
        "which the border of the part cuts: choose a number of ranks of which each has whole blocks"
    )


def _unit(param: Tensor, dim: int, name: str) -> int:
    """Return the number of rows or columns of one element along ``dim``."""
    if getattr(param, "packed_dim", None) == dim:
        return int(getattr(param, "packed_factor", 1))
    return int(getattr(param, name, 1))


def _units(size: int, unit: int) -> int:
    """Return the number of elements for ``size`` rows or columns."""
    return -(-size // unit)
