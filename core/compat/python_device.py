"""Devices in Python. Torch keeps one place for a foreign backend, ``PrivateUse1``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch, backend_registration

_set_up: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
"""Gives a backend in Python the guard and the hooks. Older versions take them in C++ only."""

_no_functions: Any = getattr(torch._C, "_disabled_torch_function_impl", None)

_wrap: Any = getattr(torch.Tensor, "_make_wrapper_subclass", None)

_is_traceable: Any = getattr(_python_dispatch, "is_traceable_wrapper_subclass", None)
"""Dynamo's own question about a tensor of a subclass, which has no public name."""

_OF_C = (
    "_ExcludeDispatchKeyGuard",
    "DispatchKeySet",
    "_dispatch_get_all_op_names",
    "_dispatch_has_kernel_for_dispatch_key",
    "_get_privateuse1_backend_name",
    "_parse_dispatch_key",
)
"""Names of ``torch._C`` by which operators find the device. Nothing public takes their place."""

_KEY = "PrivateUse1"

_kept: list[torch.library.Library] = []
"""The libraries of the fallback and the kernels. Torch drops kernels with their library."""


def why_not() -> str:
    """Return the reason if this process can have no device in Python, else an empty text."""
    if _set_up is None or _no_functions is None or _wrap is None:
        return (
            f"torch {torch.__version__} takes the guard of a device in C++ only: take a later one"
        )
    missing = [name for name in _OF_C if not hasattr(torch._C, name)]
    if not hasattr(torch._ops.OpOverload, "redispatch"):
        missing.append("OpOverload.redispatch")
    if missing:
        return (
            f"torch {torch.__version__} has no {missing[0]}, by which a device in Python runs "
            "operators: take another version of torch"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if not _kept and taken != "privateuseone":
        return f"another backend, {taken}, has the only place that torch keeps for one from outside"
    return ""


def register_device(name: str, compute: Callable[..., Any]) -> None:
    """Make a device type known to torch, once per process.

    Args:
        name: the device type.
        compute: runs an operator on the device. It takes the operator and the arguments.
    """
    if _kept:
        return
    _set_up(name)
    # Torch has no annotations here.
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(compute, _KEY)
    _kept.extend((library, _kernels_of_aten(compute)))


_OF_TENSORS_WITHOUT_NUMBERS = ("aten::detach",)
"""Operators that torch calls while it makes a fake tensor. A kernel in Python would break that."""


def _kernels_of_aten(compute: Callable[..., Any]) -> torch.library.Library:
    """Register a kernel for every operator of torch, and return the holder of the kernels.

    Code of torch in C++, such as ``torch.tensor``, calls operators while subclasses are switched
    off. A fallback in Python raises an internal error then; a kernel of the operator runs.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        if _is_made_of_others(name) or name in _OF_TENSORS_WITHOUT_NUMBERS:
            continue
        kernel = functools.partial(_run_by_name, compute, name)
        library.impl(name, kernel, _KEY)
    kept: torch.library.Library = library
    return kept


def _is_made_of_others(name: str) -> bool:
    """Return True if torch takes an operator apart before a device sees the operator."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _run_by_name(compute: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    operator = _operator(name)
    return compute(operator, *args, **kwargs)


@functools.cache
def _operator(name: str) -> Any:
    """Return the operator of a name such as ``aten::add.Tensor``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    overloads = getattr(torch.ops.aten, packet)
    return getattr(overloads, overload or "default")


def run_without_device(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator without the kernels of the device, for tensors without numbers.

    A fake tensor of the device, such as a compiler makes, says that it is on ``meta`` while the
    operator finds the shape of the result. The device's kernels come first all the same.
    """
    with torch._C._ExcludeDispatchKeyGuard(_keys()):
        return operator(*args, **kwargs)


@functools.cache
def serves_every_device(operator: Any) -> bool:
    """Return True for an operator from outside of torch with one kernel for every device.

    Such kernels are functions in Python: they call operators on the tensors of the device.
    """
    if operator.namespace in _OF_TORCH:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), "CompositeExplicitAutograd"
    )


def run_own_kernel(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of such an operator on tensors of the device."""
    return operator.redispatch(_keys(), *args, **kwargs)


def writes_to_arguments(operator: Any) -> bool:
    """Return True if an operator writes to an argument, or if torch does not tell."""
    schema: Any = getattr(operator, "_schema", None)
    return schema is None or bool(schema.is_mutable)


_OF_TORCH = ("aten", "prim", "prims", "c10d", "_c10d_functional")
"""Namespaces of operators of torch."""


@functools.cache
def _keys() -> Any:
    key: Any = torch._C._parse_dispatch_key(_KEY)
    return torch._C.DispatchKeySet(key)


_classes: set[type] = {torch.Tensor}
"""The classes of tensors with values: the class of torch, and the classes of devices in Python."""


def class_of_tensors(cls: Any) -> Any:
    """Decorate the class for the tensors of a device.

    Functions of torch take such tensors like tensors of torch: only operators reach the class.
    """
    cls.__torch_function__ = _no_functions
    _classes.add(cls)
    return cls


def stores_values(x: torch.Tensor) -> bool:
    """Return True if the class of a tensor says that values lie in memory.

    The class of a fake tensor or of a vendor's wrapper may have none.
    """
    kind = type(x)
    # Dynamo of torch 2.8 looks up no class in a set.
    if kind is torch.Tensor:
        return True
    return kind in _classes


def follows_tensor(x: torch.Tensor) -> bool:
    """Return True if ``torch.compile`` follows tensors of this class.

    Dynamo follows ``torch.Tensor``, and subclasses that describe their parts by
    ``__tensor_flatten__``. If a release of torch lacks the private name, no subclass counts.
    """
    if type(x) is torch.Tensor:
        return True
    return _is_traceable is not None and bool(_is_traceable(x))


def wrapper_of(cls: Any, values: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of a class on a device, without numbers, in the form of ``values``.

    The tensor has the shape, the strides and the dtype of ``values``, and is an inference tensor
    if ``values`` is one.
    """
    make = functools.partial(
        _wrap,
        cls,
        values.shape,
        strides=values.stride(),
        storage_offset=values.storage_offset(),
        dtype=values.dtype,
        device=device,
    )
    is_inference = values.is_inference()
    mode = torch.is_inference_mode_enabled()
    # A view of an ordinary tensor is ordinary in inference mode too, so both cases occur. To enter
    # a mode takes as long as the rest.
    if is_inference == mode:
        return make()
    with torch.inference_mode(is_inference):
        return make()
