"""The processors of the host, as ``/proc/cpuinfo`` describes them."""

from __future__ import annotations

import re

CPUINFO = "/proc/cpuinfo"

FEATURES = (
    # x86, as the line "flags" spells them
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    # Arm, as the line "Features" spells them
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
"""The instruction sets that kernels choose by."""


def features_of(cpuinfo: str) -> tuple[str, ...]:
    """Return the instruction sets of ``FEATURES`` of the first processor in a ``/proc/cpuinfo``."""
    line = first(r"^(?:flags|Features)[^\S\n]*:(.*)$", cpuinfo) or ""
    words = set(line.split())
    return tuple(feature for feature in FEATURES if feature in words)


def first(pattern: str, text: str) -> str | None:
    """Return the group of the first match of a pattern, without surrounding space."""
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else None
