"""The linear layer on CPUs over a weight that exists in packed form only.

Where a call needs the plain weight, because something must see through the operators or the arguments do not fit the
packed one, it is rebuilt for that call.
"""

from __future__ import annotations

import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from opgraft.binding.marks import gradient_required
from opgraft.compat import packed_linear as onednn
from opgraft.compat import tracing
from opgraft.errors import PackError
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.functional import linear as form
from opgraft.ops.linear.weight_cache import fits, requires_gradient
from torch import Tensor
from torch.compiler import is_dynamo_compiling


class PackedWeight:
    """A weight ``[out_features, in_features]`` that oneDNN has packed, without the plain one.

    Attributes:
        packed: an opaque tensor of that shape and dtype, which compilers cannot take.
        handle: a number of its own in a tensor, by which compiled code finds the weight. A tensor, so that one graph
            serves all layers of a shape; the number is never used again.
        dtype: of the weight.
        nbytes: that the plain weight takes.
        rows: of the weight.
        columns: of the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.inference_mode(False):
            self.packed = onednn.pack(weight)
            self.handle = torch.tensor(next(_NUMBERS), dtype=torch.int64, device="cpu")
        self.dtype, self.nbytes = weight.dtype, weight.nbytes
        self.rows, self.columns = weight.shape
        _BY_NUMBER[int(self.handle)] = self

    def dense(self) -> Tensor:
        """Rebuild the plain weight: the bits that were packed, in memory of its own, ordinary in any mode.

        What follows the operators that run sees a constant: it is rebuilt on a thread that nothing follows, as tracers
        and transforms cannot take packed tensors.
        """
        if tracing.followed() or tracing.transformed():
            with ThreadPoolExecutor(1) as unfollowed:
                return unfollowed.submit(onednn.unpack, self.packed).result()
        with torch.inference_mode(False):
            return onednn.unpack(self.packed)


_NUMBERS = itertools.count()
_BY_NUMBER: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Compute the form ``linear``, packed for any number of rows.

    Where a gradient is required, under autocast, ``torch.func``, forward-mode differentiation, a tracer or a dispatch
    mode, and where something does not fit, the plain weight is rebuilt and torch's own linear runs. The gradients are
    those by the input, the bias and the residual.

    Raises:
        ValueError: as the form does.
        PackError: ``torch.export`` looks on, and not for ``opgraft.compile``.
    """
    if is_dynamo_compiling() or tracing.capturing():
        return _compiled(x, weight, bias, activation, residual)
    return _run(x, weight, bias, activation, residual)


def dense(weight: PackedWeight) -> Tensor:
    """Return the plain weight, in compiled code too."""
    if not is_dynamo_compiling():
        return weight.dense()
    _refuse_export()
    rebuilt: Tensor = torch.ops.opgraft.dense_weight(
        weight.handle, weight.rows, weight.columns, weight.dtype
    )
    return rebuilt


def _run(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    watched = type(x) is not Tensor or requires_gradient(x, bias, residual) or onednn.watched()
    if not watched and fits(x, weight.packed, bias, residual):
        return packed_linear.by_onednn(x, weight.packed, bias, activation, residual)
    _refuse_export()
    return form.native(x, weight.dense(), bias, activation, residual)


def _compiled(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Give a compiler one operator, or the definition over a weight that another operator rebuilds."""
    plain = x.dtype != weight.dtype or not x.is_cpu or torch.is_autocast_enabled("cpu")
    if plain or tracing.exporting() or gradient_required((x, bias, residual), {}):
        return form.native(x, dense(weight), bias, activation, residual)
    result: Tensor = torch.ops.opgraft.packed_only_linear(
        x, weight.handle, weight.rows, bias, activation, residual
    )
    return result


def _refuse_export() -> None:
    if tracing.exporting():
        raise PackError(
            "torch.export met a linear layer whose weight opgraft.pack has packed, which no exported program can hold: "
            "call opgraft.unpack(model) first"
        )


def _found(handle: Tensor) -> PackedWeight:
    weight = _BY_NUMBER.get(int(handle))
    if weight is None:
        raise PackError(
            "compiled code was called with a packed weight that is gone, with the layer that had it or because that "
            "was packed anew: compile again the module that has the layer"
        )
    return weight


def _run_compiled(
    x: Tensor,
    handle: Tensor,
    rows: int,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    return _run(x, _found(handle), bias, activation, residual)


def _mapped(
    x: Tensor,
    handle: Tensor,
    rows: int,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _rebuild(handle: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return _found(handle).dense()


def _rebuilt(handle: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return handle.new_empty((rows, columns), dtype=dtype)


torch.library.define(
    "opgraft::packed_only_linear",
    "(Tensor x, Tensor handle, SymInt rows, Tensor? bias, str activation, Tensor? residual) -> Tensor",
)
torch.library.impl("opgraft::packed_only_linear", "cpu", _run_compiled)
torch.library.register_fake("opgraft::packed_only_linear", _mapped)
torch.library.define(
    "opgraft::dense_weight",
    "(Tensor handle, SymInt rows, SymInt columns, ScalarType dtype) -> Tensor",
)
torch.library.impl("opgraft::dense_weight", "cpu", _rebuild)
torch.library.register_fake("opgraft::dense_weight", _rebuilt)
