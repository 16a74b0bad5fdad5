"""Calling an op outside of the graph that it was left to a compiler for."""

from __future__ import annotations

from typing import Any

from opgraft.binding.branches import method_of
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.rebinding import hidden_by

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_uncompiled(module: Any, *inputs: Any) -> Any:
    """Call a module; an op that is disabled only so that a compiler may fuse it runs the kernel that it has otherwise.

    Its hooks run, and what stands before its kernel does, as in any call of it.

    Returns:
        What the module returns.
    """
    if not isinstance(module, CustomOp) or not module.binding.kernel.left_to_compiler or hidden_by(module):
        return module(*inputs)
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return module(*inputs)
    return method_of(module.binding.kernel.uncompiled.definition)(module, *inputs)
