"""Interventions in calls of torch by others: hooks of every module, modes, and kernels that Python code registers.

torch has public names that add interventions, and no public name shows them. If a release of torch
lacks a private name, the interventions behind that name are not seen.
"""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import torch
from torch import overrides
from torch.nn.modules import module as registries
from torch.utils import _python_dispatch

_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(registries, name, {})
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_module_registration_hooks",
        "_global_buffer_registration_hooks",
        "_global_parameter_registration_hooks",
    )
)

_STACKS: Any = (
    getattr(overrides, "_get_current_function_mode_stack", list),
    getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list),
)
"""Functions that return the modes of this thread, the one that is asked first at the end."""

_OF_C = ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
"""Modules with the functions that ``torch.nn.functional`` and its siblings call."""

_pop_function_mode: Any = getattr(overrides, "_pop_mode", None)


def hooks_of_every_module() -> list[dict[int, Any]]:
    """Return the hooks that torch calls for each module, by registry."""
    return [dict(registry) for registry in _HOOKS]


def set_hooks_of_every_module(hooks: list[dict[int, Any]]) -> None:
    """Have torch call these hooks and no others."""
    for registry, entries in zip(_HOOKS, hooks, strict=True):
        registry.clear()
        registry.update(entries)


def modules_of_c() -> tuple[ModuleType, ...]:
    """Return the modules of functions in C that public functions of torch call."""
    found = (getattr(torch._C, name, None) for name in _OF_C)
    return tuple(module for module in found if isinstance(module, ModuleType))


def entered_modes() -> list[Any]:
    """Return the modes that this thread is in, of functions, then of operators, save that of the default device."""
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return [mode for stack in _STACKS for mode in stack() if mode is not default]


def leave_other_modes(kept: list[Any]) -> None:
    """Leave the modes that this thread has entered since ``entered_modes`` has returned those to keep."""
    for mode in reversed(entered_modes()):
        if any(mode is each for each in kept):
            continue
        if isinstance(mode, overrides.TorchFunctionMode):
            _pop_function_mode()  # as its own end does; that of a device fails, which torch enters in C++
        else:
            mode.__exit__(None, None, None)


def registered_kernels() -> frozenset[str]:
    """Return the kernels that Python code has registered, each as ``namespace/operator/dispatch key``."""
    return frozenset(getattr(torch.library, "_impls", ()))


def remove_kernel(kernel: str) -> None:
    """Remove a kernel of ``registered_kernels``, with all else that the same object has registered.

    Raises:
        RuntimeError: no object was found that has registered the kernel.
    """
    # Such an object lives in a module of a plugin, under any name.
    libraries = [each for each in gc.get_objects() if issubclass(type(each), torch.library.Library)]
    owners = [each for each in libraries if kernel in getattr(each, "_op_impls", ())]
    for owner in owners:
        owner._destroy()
    if kernel in registered_kernels():
        raise RuntimeError("it lasts as long as the library object that has registered it")
