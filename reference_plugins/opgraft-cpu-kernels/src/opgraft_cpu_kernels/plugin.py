"""The plugin's hooks. They put the plugin's classes in place of the catalogue's on the CPU."""

from __future__ import annotations

import opgraft

from opgraft_cpu_kernels import attention, library, linear, lossless, ops, tiles
from opgraft_cpu_kernels.communicator import SharedMemoryCommunicator
from opgraft_cpu_kernels.decoder import DecoderPlan
from opgraft_cpu_kernels.nodes import AttentionNodes
from opgraft_cpu_kernels.sampler import Sampler

platforms = ("cpu",)

CONDITIONS = {
    ops.Linear: linear.has_kernel,
    ops.GatedMLP: linear.has_kernel,
    ops.Attention: attention.has_kernel,
}
"""Class → function of the platform that says whether the class is of use there."""


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register the replacements. If the library is missing, the native definitions run.

    Raises:
        ValueError: the environment names a path that this CPU does not have.
    """
    missing = library.missing()
    if missing and missing.startswith(library.VARIABLE):
        raise ValueError(missing)
    for replacement in ops.REPLACEMENTS:
        # The class of the catalogue is the first base.
        target = replacement.__mro__[1]
        when = CONDITIONS.get(replacement)
        opgraft.CustomOp.register_oot(replacement, name=target, when=when)
    for name, method in tiles.METHODS.items():
        opgraft.PluggableClass.register_oot(method, name=name)
    opgraft.PluggableClass.register_oot(
        lossless.Lossless12LinearMethod, name="lossless12_linear_method"
    )
    built = attention.has_kernel
    opgraft.PluggableClass.register_oot(DecoderPlan, name="decoder_plan", when=built)
    opgraft.PluggableClass.register_oot(AttentionNodes, name="attention_nodes", when=built)
    opgraft.PluggableClass.register_oot(Sampler, name="sampler", when=built)
    opgraft.PluggableClass.register_oot(SharedMemoryCommunicator, name="communicator")
