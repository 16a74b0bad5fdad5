"""The numbered contracts of parts that a plugin can replace.

Callers rely on the contract of a part: on methods, arguments and results. A number grows if a
replacement of the part may be wrong afterwards. An addition with a default does not count.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from opgraft.errors import PluginError, close_matches

CONTRACTS: Mapping[str, int] = MappingProxyType(
    {
        "kernel": 1,
        "weight_method": 1,
        "attention": 1,
        "communicator": 1,
        "worker": 1,
        "model_runner": 1,
        "sampler": 1,
        "scheduler": 1,
        "kv_cache_manager": 1,
        "proposer": 1,
        "executor": 1,
        "memory_query": 1,
        "step_graph": 1,
        "static_graph": 1,
        "platform": 1,
    }
)
"""Part → the number of its contract."""


def check_contracts(stated: object) -> None:
    """Check the attribute ``contracts`` of a plugin; ``None`` states nothing.

    Raises:
        PluginError: the attribute is no mapping of parts to numbers, or a number is another one
            than here.
    """
    if stated is None:
        return
    for part, number in _rows(stated):
        if part not in CONTRACTS:
            raise PluginError(
                f"contracts names the part {part!r}, which this opgraft does not have: "
                f"{close_matches(part, CONTRACTS)}"
            )
        if number != CONTRACTS[part]:
            # The side with the smaller number is behind, so a new version of that side helps.
            older = "opgraft" if number > CONTRACTS[part] else "the plugin"
            raise PluginError(
                f"it was written for contract {number} of {part!r}, and this opgraft has contract "
                f"{CONTRACTS[part]}: install a newer version of {older}"
            )


def _rows(stated: object) -> list[tuple[str, int]]:
    """Return the parts with their numbers.

    Raises:
        PluginError: the attribute has another form.
    """
    if isinstance(stated, Mapping):
        items: list[Any] = list(stated.items())
        # No isinstance for numbers: True is an integer in Python.
        if all(isinstance(part, str) and type(number) is int for part, number in items):
            return items
    raise PluginError(
        "contracts must name parts with the numbers that the plugin was written for, such as "
        f"contracts = {{'kernel': {CONTRACTS['kernel']}}} (it has {reprlib.repr(stated)})"
    )
