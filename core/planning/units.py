"""Quantities with units, as people write them: ``80GiB``, ``3.35TB/s``, ``989TFLOPS``, ``3us``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import log2
from types import MappingProxyType

from opgraft.errors import InputError

_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3} | {
    letter: 1e3**n for n, letter in enumerate("KMGTPE", 1)
}
_PREFIXES |= {f"{letter}i": 1024.0**n for n, letter in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-zA-Z/]*)\s*")

UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "bytes": {"B": 1.0},
        "bytes per second": {"B/s": 1.0, "Bps": 1.0, "b/s": 0.125, "bit/s": 0.125, "bps": 0.125},
        "operations per second": {"FLOPS": 1.0, "FLOP/s": 1.0, "flops": 1.0},
        "seconds": {"s": 1.0},
    }
)
"""Kind of quantity → its units, each with what one of it is."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "bytes": "80GiB",
        "bytes per second": "3.35TB/s",
        "operations per second": "989TFLOPS",
        "seconds": "3us",
    }
)


def parse_quantity(text: str, kind: str, what: str) -> float:
    """Return a quantity in the basic unit of its kind.

    Args:
        text: a number with a unit, which may have a prefix such as ``G`` for a thousand million or ``Gi`` for 2³⁰.
        kind: one of ``UNITS``.
        what: the option that has it, for messages.

    Raises:
        InputError: it is no such quantity, or not above zero.
    """
    found = _QUANTITY.fullmatch(text)
    factor = _factor(found[2], UNITS[kind]) if found else None
    if found is None or factor is None or not float(found[1]):
        raise InputError(
            f"{what} is {text!r:.60}, expected {kind} above zero with their unit, such as {EXAMPLES[kind]}: units are "
            f"{', '.join(UNITS[kind])}, with prefixes such as G (10⁹) and Gi (2³⁰)"
        )
    return float(found[1]) * factor


def _factor(unit: str, units: Mapping[str, float]) -> float | None:
    for name, factor in units.items():
        if unit.endswith(name) and unit.removesuffix(name) in _PREFIXES:
            return _PREFIXES[unit.removesuffix(name)] * factor
    return None


def in_bytes(count: float) -> str:
    """Return a number of bytes with a unit that suits it, such as ``1.5 GiB``."""
    power = min(4, max(0, int(log2(count)) // 10)) if count >= 1 else 0
    return f"{count / 1024**power:.4g} {('', 'Ki', 'Mi', 'Gi', 'Ti')[power]}B"


def in_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it, such as ``1.5 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
