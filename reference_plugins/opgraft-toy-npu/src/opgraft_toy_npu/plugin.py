"""The plugin's hooks. The host calls them once the platform is decided."""

from __future__ import annotations

import opgraft

from opgraft_toy_npu.attention import ToyAttention
from opgraft_toy_npu.communicator import RingCommunicator
from opgraft_toy_npu.ops import REPLACEMENTS

contracts = {"kernel": 1, "attention": 1, "communicator": 1}
"""The contracts that the classes were written for: a host with others reports that at once."""


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register the kernels, the attention and the communicator under the names of their targets."""
    for target, replacement in REPLACEMENTS.items():
        opgraft.CustomOp.register_oot(_decorated_op_cls=replacement, name=target)
    opgraft.CustomOp.register_oot(_decorated_op_cls=ToyAttention, name="Attention")
    opgraft.PluggableClass.register_oot(RingCommunicator, name="communicator")
