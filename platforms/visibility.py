"""Environment variables that choose devices by number or by UUID; shared by the probes of GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence


def chosen(value: str, identities: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the positions that a list such as ``2,0`` or ``GPU-8932f937,GPU-1f5b`` names, in its order.

    ``identities`` holds the UUIDs of each device; its first characters will do. The first entry that names no device
    ends the list ("-1" is the usual one), and a device that is named twice empties it.
    The rules are those of the CUDA programming guide, "CUDA Environment Variables", and of ``torch.cuda``; ROCm's "GPU
    isolation techniques" describes the same lists.
    """
    positions: list[int] = []
    for entry in value.lower().split(","):
        position = _position(entry.strip(), identities)
        if position is None:
            break
        if position in positions:
            return ()
        positions.append(position)
    return tuple(positions)


def _position(entry: str, identities: Sequence[Sequence[str]]) -> int | None:
    if re.fullmatch(r"[0-9]{1,6}", entry):
        return int(entry) if int(entry) < len(identities) else None
    if len(entry) <= len("gpu-"):
        return None
    matches = [
        at
        for at, names in enumerate(identities)
        if any(name.lower().startswith(entry) for name in names)
    ]
    return matches[0] if len(matches) == 1 else None
