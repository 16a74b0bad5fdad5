"""Reasons why a module must stay, whatever it computes."""

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
    """Find the modules whose parent reads their weights instead of calling them, with the reason to leave them."""
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
    """Say why a module of whatever class must stay, ``None`` if nothing forbids to replace it."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if parametrize.is_parametrized(module):
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward was set on the instance"
    if vars(module).get("_compiled_call_impl"):
        return "it was compiled in place"
    foreign = [
        f"{name} is a {type(p).__name__}"
        for name, p in module._parameters.items()
        if type(p) not in _PLAIN
    ]
    if foreign:
        return f"its {foreign[0]}, which kernels may not take"
    hooks = [name for name in _HOOKS if vars(module).get(name)]
    return f"it has hooks ({hooks[0].strip('_').replace('_', ' ')})" if hooks else None


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a model or to something below it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who never imported it has sharded nothing
    kind = getattr(fsdp, "FSDPModule", ())
    return any(isinstance(module, kind) for module in model.modules())
