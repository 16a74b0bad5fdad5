"""Machines with devices of two vendors."""

from __future__ import annotations

from support.machines.amd import add_card, add_cpu_node
from support.machines.build import Tree
from support.machines.nvidia import A40, add_driver, add_gpus


def nvidia_and_amd(tree: Tree) -> None:
    """One card of either; the installed torch serves one of them."""
    tree.add_cpu("AMD EPYC 9654 96-Core Processor", "fpu sse4_2 avx avx2 avx512f")
    tree.add_torch("2.8.0+cu128", cuda="12.8")
    add_driver(tree)
    add_gpus(tree, 1, A40)
    add_cpu_node(tree, 0)
    tree.add_nodes("/dev/kfd")
    add_card(tree, 2, 1)


MACHINES = {"mixed-nvidia-amd": nvidia_and_amd}
