"""What kernels keep beside a weight, such as a copy in a layout of their own, for as long as the weight is unchanged.

A weight is a parameter, which stays as it is. It counts as changed when its memory, its shape or its version is another
one, which optimizers, ``load_state_dict``, ``.to()`` and assignments to ``.data`` see to; writing through ``.data``
does not: ``refresh`` is for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from opgraft.compat.packed_linear import version_of
from opgraft.compat.packed_linear import watched as watched
from opgraft.ops.checks import expect_module
from torch import Tensor, nn


@dataclass(slots=True)
class Known:
    """What is known of one parameter.

    Attributes:
        reference: to the parameter.
        dtype: of the parameter.
        storage: to the parameter's, which tells apart two that had the same address one after the other.
        state: what else must not have changed for the rest to be right.
        packed: the packed weight, once it was needed.
    """

    reference: weakref.ref[nn.Parameter]
    dtype: torch.dtype
    storage: weakref.ref[torch.UntypedStorage]
    state: tuple[object, ...]
    packed: Tensor | None


Entry = TypeVar("Entry", bound=Known)


class WeightCache(dict[int, Entry]):
    """What is known, by the ``id`` of the parameter; an entry goes with its parameter."""

    def __init__(self) -> None:
        super().__init__()
        _CACHES[id(self)] = self

    def current(self, weight: nn.Parameter) -> Entry | None:
        """What is known of a parameter and still right."""
        known = self.get(id(weight))
        if known is None or known.reference() is not weight or known.storage() is not weight.untyped_storage():
            return None
        return known if known.state == _state_of(weight) else None

    def meet(self, weight: nn.Parameter, kind: Callable[..., Entry], *more: object) -> Entry:
        """Write down a parameter as it is now, with what an entry of that kind has beside the rest."""
        key = id(weight)
        reference = weakref.ref(weight, lambda _: self.pop(key, None))
        storage = weakref.ref(weight.untyped_storage())
        known = self[key] = kind(reference, weight.dtype, storage, _state_of(weight), None, *more)
        return known


_CACHES: weakref.WeakValueDictionary[int, WeightCache[Any]] = weakref.WeakValueDictionary()


def refresh(target: nn.Module | Tensor) -> None:
    """Forget what kernels keep of a parameter, or of all parameters below a module, such as packed weights.

    For after a change that leaves no trace in the version of a tensor, which is one written through ``.data``, such as
    ``weight.data.copy_(merged)``. What shares memory with the parameters is forgotten too. It also frees the packed
    weights until the next call.
    """
    if not isinstance(target, Tensor):
        expect_module("refresh", target)
    parameters = target.parameters() if isinstance(target, nn.Module) else [target]
    changed = {p.untyped_storage().data_ptr() for p in parameters if p.is_cpu and p.layout is torch.strided}
    for cache in list(_CACHES.values()):
        for key, known in list(cache.items()):
            held = known.reference()
            if held is not None and held.untyped_storage().data_ptr() in changed:
                cache.pop(key, None)


def is_ordinary(weight: nn.Parameter) -> bool:
    """Whether a parameter is a matrix in CPU memory that tells when it is written to."""
    return weight.layout is torch.strided and weight.is_cpu and not weight.is_inference() and weight.dim() == 2


def _state_of(weight: nn.Parameter) -> tuple[object, ...]:
    if weight.is_inference():
        return ()
    return weight.data_ptr(), version_of(weight), weight.dtype, weight.shape, weight.stride()


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether the arguments of a linear layer have shapes and dtypes that a kernel takes without a look of its own."""
    rows, columns = weight.shape
    shape, dtype = x.shape, weight.dtype
    if shape[-1:] != (columns,) or (bias is not None and (bias.shape != (rows,) or not bias.is_contiguous())):
        return False
    if residual is not None and residual.shape != (*shape[:-1], rows):
        return False
    for other in (x, bias, residual):
        if other is not None and not (other.dtype is dtype and other.is_cpu and other.layout is torch.strided):
            return False
    return True


def requires_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to know what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
