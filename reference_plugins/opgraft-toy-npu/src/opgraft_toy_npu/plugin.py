"""The plugin's hooks. The host calls them once the platform is decided."""

from __future__ import annotations

import opgraft

from opgraft_toy_npu.attention import ToyAttention
from opgraft_toy_npu.communicator import RingCommunicator
from opgraft_toy_npu.ops import REPLACEMENTS


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register the kernels, the attention and the communicator under the names of their targets."""
    for target, replacement in REPLACEMENTS.items():
        opgraft.CustomOp.register_oot(_decorated_op_cls=replacement, name=target)
    opgraft.CustomOp.register_oot(_decorated_op_cls=ToyAttention, name="Attention")
    opgraft.PluggableClass.register_oot(RingCommunicator, name="communicator")
