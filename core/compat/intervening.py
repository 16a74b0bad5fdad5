"""Hooks of every module, modes, and kernels that other code has added to torch.

torch has public names for adding interventions, and private names for looking at them. Without a
private name in a release of torch, nothing is seen.
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
"""Functions that return the modes of this thread. Torch asks the last mode first."""

_OF_C = ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
"""Modules of functions in C, behind ``torch.nn.functional`` and its siblings."""

_pop_function_mode: Any = getattr(overrides, "_pop_mode", None)


def hooks_of_every_module() -> list[dict[int, Any]]:
    """Return the hooks that torch calls for each module, by registry."""
    return [dict(registry) for registry in _HOOKS]


def set_hooks_of_every_module(hooks: list[dict[int, Any]]) -> None:
    """Replace the hooks that torch calls for each module."""
    for registry, entries in zip(_HOOKS, hooks, strict=True):
        registry.clear()
        registry.update(entries)


def modules_of_c() -> tuple[ModuleType, ...]:
    """Return the modules of functions in C behind public functions of torch."""
    modules = []
    for name in _OF_C:
        module = getattr(torch._C, name, None)
        # A release of torch may lack one.
        if isinstance(module, ModuleType):
            modules.append(module)
    return tuple(modules)


def entered_modes() -> list[Any]:
    """Return the modes of this thread for functions, then for operators, but no default device."""
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return [mode for stack in _STACKS for mode in stack() if mode is not default]


def leave_other_modes(kept: list[Any]) -> None:
    """Leave all modes of this thread but those of an earlier ``entered_modes``."""
    for mode in reversed(entered_modes()):
        if any(mode is each for each in kept):
            continue
        if isinstance(mode, overrides.TorchFunctionMode):
            # As in the mode's __exit__. The __exit__ of a device fails, as torch enters it in C++.
            _pop_function_mode()
        else:
            mode.__exit__(None, None, None)


def registered_kernels() -> frozenset[str]:
    """Return the kernels of Python code, each as ``namespace/operator/dispatch key``."""
    return frozenset(getattr(torch.library, "_impls", ()))


def remove_kernel(kernel: str) -> None:
    """Remove a kernel of ``registered_kernels``, with the other kernels of the same library.

    Raises:
        RuntimeError: the library was not found.
    """
    # A plugin holds the library under any name.
    for each in gc.get_objects():
        # By type, as a proxy gives the class of another object.
        if not issubclass(type(each), torch.library.Library):
            continue
        own = getattr(each, "_op_impls", ())
        if kernel in own:
            each._destroy()
    if kernel in registered_kernels():
        raise RuntimeError("it lasts as long as the library object that has registered it")
