"""The plugin's hooks: its classes take the place of the catalogue's on the CPU platform."""

from __future__ import annotations

import opgraft

from opgraft_cpu_kernels import (
    attention,
    communicator,
    decoder,
    library,
    linear,
    nodes,
    ops,
    sampler,
    tiles,
)

platforms = ("cpu",)


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Declare the replacements. Where the library is missing they say so, and the native definitions run.

    Raises:
        ValueError: the environment names a path that this CPU does not have.
    """
    missing = library.missing()
    if missing and missing.startswith(library.VARIABLE):
        raise ValueError(missing)
    conditions = {
        ops.Linear: linear.has_kernel,
        ops.GatedMLP: linear.has_kernel,
        ops.Attention: attention.has_kernel,
    }
    for replacement in ops.REPLACEMENTS:
        when = conditions.get(replacement)
        opgraft.CustomOp.register_oot(replacement, name=replacement.__mro__[1], when=when)
    for name, method in tiles.METHODS.items():
        opgraft.PluggableClass.register_oot(method, name=name)
    opgraft.PluggableClass.register_oot(
        decoder.DecoderPlan, name="decoder_plan", when=attention.has_kernel
    )
    opgraft.PluggableClass.register_oot(
        nodes.AttentionNodes, name="attention_nodes", when=attention.has_kernel
    )
    opgraft.PluggableClass.register_oot(sampler.Sampler, name="sampler", when=attention.has_kernel)
    opgraft.PluggableClass.register_oot(communicator.SharedMemoryCommunicator, name="communicator")
