"""The collectives of the tensor group, and registered ops for the collectives of any group.

Compilers see the ops. An op finds the group by kind in each call, so compiled code serves any
communicator.
"""

from __future__ import annotations

import torch
from opgraft.distributed.communicator import Communicator
from opgraft.distributed.groups import get_tp_group, parallelism
from opgraft.errors import DistributedError
from torch import Tensor


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Sum a tensor over the tensor group. A single rank returns the tensor itself."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Join the tensors of the tensor group along ``dim``."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """Sum a tensor over the tensor group and keep this rank's part along ``dim``."""
    return get_tp_group().reduce_scatter(input_, dim)


def tensor_model_parallel_gather(input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """Join the tensors of the tensor group along ``dim`` on rank ``dst``; else return ``None``."""
    return get_tp_group().gather(input_, dst, dim)


def communicator_of(kind: str) -> Communicator:
    """Return the communicator of a kind of group.

    Raises:
        DistributedError: this process is alone in the group.
    """
    communicator = parallelism().groups[kind].communicator
    if communicator is None:
        raise DistributedError(
            f"code that was compiled for a {kind} group of several ranks runs where this process "
            "is alone: call opgraft.distributed.init_distributed first, or compile again"
        )
    return communicator


def _all_reduce(x: Tensor, kind: str) -> Tensor:
    return communicator_of(kind).all_reduce(x)


def _all_gather(x: Tensor, dim: int, world_size: int, kind: str) -> Tensor:
    return communicator_of(kind).all_gather(x, dim)


def _reduce_scatter(x: Tensor, dim: int, world_size: int, kind: str) -> Tensor:
    return communicator_of(kind).reduce_scatter(x, dim)


def _padded(x: Tensor, world_size: int) -> Tensor:
    """Append rows of zeros until the number of ranks divides the number of rows."""
    missing = -x.shape[0] % world_size
    # Most batches need no padding, and a copy of the rows would take time.
    if not missing:
        return x
    zeros = x.new_zeros((missing, *x.shape[1:]))
    return torch.cat((x, zeros))


def _reduce_scatter_rows(x: Tensor, world_size: int, kind: str) -> Tensor:
    return communicator_of(kind).reduce_scatter(_padded(x, world_size), 0)


def _all_gather_rows(x: Tensor, rows: int, world_size: int, kind: str) -> Tensor:
    communicator = communicator_of(kind)
    is_fp8 = x.itemsize == 1 and x.is_floating_point()
    if not is_fp8:
        return communicator.all_gather(x, 0)[:rows]
    # A backend may not send fp8, but all send bytes.
    gathered = communicator.all_gather(x.view(torch.uint8), 0)
    return gathered.view(x.dtype)[:rows]


def _rows_of_rank(x: Tensor, world_size: int, kind: str) -> Tensor:
    rows = -(-x.shape[0] // world_size)
    first = communicator_of(kind).rank * rows
    # An op of torch must not return a view of its argument.
    return _padded(x, world_size).narrow(0, first, rows).clone()


def _summed(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


def _gathered(x: Tensor, dim: int, world_size: int, kind: str) -> Tensor:
    # A number counts as a vector of one element, as in ``Communicator.all_gather``.
    shape = list(x.shape) or [1]
    shape[dim] *= world_size
    return x.new_empty(shape)


def _part(x: Tensor, dim: int, world_size: int, kind: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= world_size
    return x.new_empty(shape)


def _part_of_rows(x: Tensor, world_size: int, kind: str) -> Tensor:
    rows = (x.shape[0] + world_size - 1) // world_size
    return x.new_empty((rows, *x.shape[1:]))


def _all_rows(x: Tensor, rows: int, world_size: int, kind: str) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


# Arguments of an op are tensors, numbers and texts, so that the kind stands for the group.
for _name, _signature, _run, _fake in (
    ("all_reduce", "(Tensor x, str kind) -> Tensor", _all_reduce, _summed),
    (
        "all_gather",
        "(Tensor x, int dim, int world_size, str kind) -> Tensor",
        _all_gather,
        _gathered,
    ),
    (
        "reduce_scatter",
        "(Tensor x, int dim, int world_size, str kind) -> Tensor",
        _reduce_scatter,
        _part,
    ),
    # Each rank has an equal number of rows. Rows of zeros fill up the last ranks.
    (
        "reduce_scatter_rows",
        "(Tensor x, int world_size, str kind) -> Tensor",
        _reduce_scatter_rows,
        _part_of_rows,
    ),
    (
        "rows_of_rank",
        "(Tensor x, int world_size, str kind) -> Tensor",
        _rows_of_rank,
        _part_of_rows,
    ),
    (
        "all_gather_rows",
        "(Tensor x, SymInt rows, int world_size, str kind) -> Tensor",
        _all_gather_rows,
        _all_rows,
    ),
):
    torch.library.define(f"opgraft::{_name}", _signature)
    torch.library.impl(f"opgraft::{_name}", "default", _run)
    torch.library.register_fake(f"opgraft::{_name}", _fake)
