"""The plugin's hooks, which the host calls once the platform is decided."""

from __future__ import annotations

import opgraft

from opgraft_toy_npu import attention, communicator, ops


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Put the kernels in place of the catalogue's classes."""
    for target, replacement in ops.REPLACEMENTS.items():
        opgraft.CustomOp.register_oot(_decorated_op_cls=replacement, name=target)
    opgraft.CustomOp.register_oot(_decorated_op_cls=attention.ToyAttention, name="Attention")
    opgraft.PluggableClass.register_oot(communicator.RingCommunicator, name="communicator")
