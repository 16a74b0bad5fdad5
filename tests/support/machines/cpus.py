"""Machines without an accelerator, of three instruction sets.

/proc/cpuinfo: x86 as arch/x86/kernel/cpu/proc.c of Linux prints it, Arm as arch/arm64/kernel/cpuinfo.c does; the flags
are those of arch/x86/include/asm/cpufeatures.h and the hwcap_str table of the latter.
"""

from __future__ import annotations

from support.machines.build import Tree


def avx2(tree: Tree) -> None:
    tree.add_cpu(
        "AMD EPYC 7302 16-Core Processor", "fpu sse4_2 avx f16c fma avx2", memory_kib=131886164
    )
    tree.add_other_functions(8)


def amx(tree: Tree) -> None:
    tree.add_cpu()
    tree.add_other_functions(8)


def sve(tree: Tree) -> None:
    """Arm gives no model name, but the numbers of implementer and part: 0x41, 0xd4f is a Neoverse V2."""
    features = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp sve sve2 svebf16 i8mm bf16"
    identity = (
        "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n"
        "CPU part\t: 0xd4f\nCPU revision\t: 0\n"
    )
    blocks = (
        f"processor\t: {index}\nBogoMIPS\t: 2000.00\nFeatures\t: {features}\n{identity}"
        for index in range(4)
    )
    tree.write("/proc/cpuinfo", "\n".join(blocks) + "\n")
    tree.write("/proc/meminfo", "MemTotal:       501987776 kB\n")


MACHINES = {"cpu-avx2": avx2, "cpu-amx": amx, "cpu-arm-sve": sve}
