"""Quantizations by name. Plugins add and replace quantizations as any pluggable class."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.errors import QuantizationError, near_matches
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state


def quantizations() -> Mapping[str, type[QuantizationConfig]]:
    """Return the config class of every quantization by name, also of plugins."""
    load_plugins()
    records = host_state().registry.classes.items()
    return {
        name: record.cls for name, record in records if issubclass(record.cls, QuantizationConfig)
    }


def quantization_named(name: str) -> type[QuantizationConfig]:
    """Return the config class of a quantization.

    Other spellings, such as ``FP8`` and ``int8-dynamic``, are understood.

    Raises:
        QuantizationError: there is no such quantization.
    """
    known = quantizations()
    # Checkpoints write "compressed-tensors", for example.
    if name not in known:
        name = name.lower().replace("-", "_")
    if name in known:
        return known[name]
    near = near_matches(name, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise QuantizationError(
        f"no quantization is called {name!r}: {hint}There are {', '.join(sorted(known))}; a "
        "plugin adds one by PluggableClass.register"
    )
