"""The processors of the host, as ``/proc/cpuinfo`` describes them."""

from __future__ import annotations

import re

CPUINFO = "/proc/cpuinfo"

FEATURES = (
    *(
        "avx2",
        "avx512f",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
    ),
    *("asimd", "sve", "bf16", "i8mm"),
)
"""The instruction sets that kernels care about, as x86 ``flags`` and Arm ``Features`` spell them."""


def features_of(cpuinfo: str) -> tuple[str, ...]:
    """Return the instruction sets of ``FEATURES`` that the first processor of a ``/proc/cpuinfo`` lists."""
    words = set((first(r"^(?:flags|Features)[^\S\n]*:(.*)$", cpuinfo) or "").split())
    return tuple(feature for feature in FEATURES if feature in words)


def first(pattern: str, text: str) -> str | None:
    """Return the group of the first match of a pattern with one, without surrounding space."""
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else None
