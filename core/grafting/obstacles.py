"""Reasons for a module to stay, whatever the module computes."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.utils import parametrize

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_PLAIN = (nn.Parameter, type(None))
_READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def read_by_parents(model: nn.Module) -> dict[nn.Module, str]:
    """Map modules to the reason to stay, if a parent reads their weights instead of a call."""
    reasons = {}
    for parent in model.modules():
        if isinstance(parent, _READ_THEIR_CHILDREN):
            reason = f"{type(parent).__name__} reads its weights in fused code"
            reasons.update({module: reason for module in parent.modules() if module is not parent})
        elif parametrize.is_parametrized(parent):
            inside = parent.get_submodule("parametrizations")
            reasons.update(dict.fromkeys(inside.modules(), "it belongs to a parametrization"))
    return reasons


def obstacle_of(module: nn.Module) -> str | None:
    """Return the reason why a module of any class must stay, or ``None``."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if parametrize.is_parametrized(module):
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward was set on the instance"
    if vars(module).get("_compiled_call_impl"):
        return "it was compiled in place"

    for name, parameter in module._parameters.items():
        if type(parameter) not in _PLAIN:
            kind = type(parameter).__name__
            return f"its {name} is a {kind}, which kernels may not take"

    for name in _HOOKS:
        if vars(module).get(name):
            return f"it has hooks ({name.strip('_').replace('_', ' ')})"

    return None


def is_sharded(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to a model, or to a part of the model."""
    # Nothing is sharded in a process that never imported the module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    return any(isinstance(module, kind) for module in model.modules())
