"""Variables that choose devices by number or UUID; shared by the probes of GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence


def chosen(value: str, identities: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the positions of the devices in a list such as ``2,0`` or ``GPU-8932f937,GPU-1f5b``.

    The first characters of a UUID are enough. An entry without a device, such as ``-1``, ends the
    list. A list with one device twice is empty.

    Source: "CUDA Environment Variables" in the CUDA programming guide, and ``torch.cuda``. ROCm's
    "GPU isolation techniques" describes the same lists.

    Args:
        value: the value of a variable.
        identities: the UUIDs of each device.
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
    matches = []
    for position, names in enumerate(identities):
        if any(name.lower().startswith(entry) for name in names):
            matches.append(position)
    return matches[0] if len(matches) == 1 else None
