"""Quantities with units, as people write them: ``80GiB``, ``3.35TB/s``, ``989TFLOPS``, ``3us``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import log2
from types import MappingProxyType

from opgraft.errors import InputError

_PREFIXES = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    **{letter: 1e3**power for power, letter in enumerate("KMGTPE", 1)},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-zA-Z/]*)\s*")

UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "bytes": {"B": 1.0},
        "bytes per second": {"B/s": 1.0, "Bps": 1.0, "b/s": 0.125, "bit/s": 0.125, "bps": 0.125},
        "operations per second": {"FLOPS": 1.0, "FLOP/s": 1.0, "flops": 1.0},
        "seconds": {"s": 1.0},
    }
)
"""Kind of quantity → unit → the size of the unit in the first unit."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "bytes": "80GiB",
        "bytes per second": "3.35TB/s",
        "operations per second": "989TFLOPS",
        "seconds": "3us",
    }
)


def parse_quantity(text: str, kind: str, what: str) -> float:
    """Return a quantity in the first unit of its kind. ``"3us"`` gives 3e-6 seconds.

    Args:
        text: a number with a unit. The unit may have a prefix, such as ``G`` for a thousand million
            or ``Gi`` for 2³⁰.
        kind: one of ``UNITS``.
        what: the name of the option, for messages.

    Raises:
        InputError: the text is no such quantity, or is not above zero.
    """
    found = _QUANTITY.fullmatch(text)
    number = float(found[1]) if found else 0.0
    factor = _factor(found[2], UNITS[kind]) if found else None
    if factor is None or not number:
        raise InputError(
            f"{what} is {text!r:.60}, expected {kind} above zero with their unit, such as "
            f"{EXAMPLES[kind]}: units are {', '.join(UNITS[kind])}, with prefixes such as G (10⁹) "
            "and Gi (2³⁰)"
        )
    return number * factor


def _factor(unit: str, units: Mapping[str, float]) -> float | None:
    """Return the size of a unit with its prefix; ``None`` for a unit that is not known."""
    for name, factor in units.items():
        # "GB/s" has the unit "B/s" and the prefix "G".
        prefix = unit.removesuffix(name)
        if unit.endswith(name) and prefix in _PREFIXES:
            return _PREFIXES[prefix] * factor
    return None


def in_bytes(count: float) -> str:
    """Return a number of bytes with a suitable prefix, such as ``1.5 GiB``."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti")
    power = 0
    if count >= 1:
        power = min(len(prefixes) - 1, int(log2(count)) // 10)
    return f"{count / 1024**power:.4g} {prefixes[power]}B"


def in_seconds(seconds: float) -> str:
    """Return a time with a suitable prefix, such as ``1.5 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
