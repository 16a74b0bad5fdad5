"""Shared values of torch: how each is read, set and shown."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from opgraft.compat import intervening
from opgraft.compat.content import content_of
from opgraft.compat.graphs import graphs_of_inductor
from opgraft.plugins.changes import GuardedValue, attribute, value
from opgraft.registry.state import host_state


def set_default_device(device: torch.device) -> None:
    # Any other value than None enters a mode of torch, and the mode slows each call down.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def deterministic() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


def set_deterministic(state: tuple[bool, bool]) -> None:
    enabled, warn_only = state
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


_ENTERED: list[torch.inference_mode] = []
"""Modes that last as long as the process: each ends with its object."""


def set_inference_mode(enabled: bool) -> None:
    """Enter the mode or its opposite within the open mode of a plugin."""
    recorded = torch.is_grad_enabled()
    # torch has no function that ends a mode from outside: another mode inside hides the first.
    mode = torch.inference_mode(enabled)
    mode.__enter__()
    _ENTERED.append(mode)
    torch.set_grad_enabled(recorded)


def flushes_tiny_numbers() -> bool:
    """Return True if the processor takes numbers below the normal range for zero."""
    # torch has a function that sets the flag, and none that returns it.
    smallest = sys.float_info.min
    return smallest / 2 == 0


def automatic_dtypes() -> dict[str, bool]:
    """Return the device types in use, and whether autocast is on for each."""
    # Other devices are not in use, and torch may know nothing about them.
    devices = dict.fromkeys(("cpu", _device_type()))
    return {each: torch.is_autocast_enabled(each) for each in devices if _has_autocast(each)}


def _device_type() -> str:
    selection = host_state().selection
    return selection.platform.device_type if selection else "cpu"


def _has_autocast(device: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device)
    except RuntimeError:  # torch does not know the type, as the doctor says
        return False


def set_automatic_dtypes(enabled: Mapping[str, bool]) -> None:
    for device, on in enabled.items():
        torch.set_autocast_enabled(device, on)


def enabled_devices(enabled: Mapping[str, bool]) -> str:
    return ", ".join(device for device, on in enabled.items() if on) or "no device"


def random_state() -> bytearray:
    return content_of(torch.get_rng_state())


def set_random_state(state: bytearray) -> None:
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


def flags() -> Iterator[GuardedValue]:
    """Yield the flags of torch's libraries."""
    for backend in _backends():
        for name in ("enabled", "benchmark", "deterministic"):
            if isinstance(getattr(backend, name, None), bool):
                yield attribute(backend, name)


def ways_of_attention() -> Iterator[GuardedValue]:
    """Yield the switches of ``scaled_dot_product_attention``."""
    for backend in _backends():
        for name in vars(backend):
            way, found, _ = name.partition("_sdp_enabled")
            if found:
                write = getattr(backend, f"enable_{way}_sdp")
                label = f"whether attention may be computed by {way}"
                yield value(label, getattr(backend, name), write)


def _backends() -> list[ModuleType]:
    return [each for each in vars(torch.backends).values() if isinstance(each, ModuleType)]


def _owners_of_precision() -> dict[str, Any]:
    """Return the modules and objects with a ``fp32_precision``. The first one is for all others."""
    owners: dict[str, Any] = {"all": torch.backends}
    for backend in _backends():
        name = backend.__name__.rpartition(".")[2]
        owners[name] = backend
        for kind in ("matmul", "conv", "rnn"):
            owners[f"{name}.{kind}"] = getattr(backend, kind, None)
    # Older releases of torch have none.
    return {name: each for name, each in owners.items() if hasattr(each, "fp32_precision")}


_PRODUCTS = "products"


def precisions() -> dict[str, str]:
    """Return the precision of computations in float32: of products, and of each library."""
    owners = _owners_of_precision()
    found = {name: str(owner.fp32_precision) for name, owner in owners.items()}
    # torch refuses to name one for products if libraries have several.
    with suppress(RuntimeError):
        found[_PRODUCTS] = torch.get_float32_matmul_precision()
    return found


def set_precisions(former: Mapping[str, str]) -> None:
    # First, as it also sets libraries.
    products = former.get(_PRODUCTS)
    if products is not None and precisions().get(_PRODUCTS) != products:
        torch.set_float32_matmul_precision(products)
    for name, owner in _owners_of_precision().items():
        precision = former.get(name)
        if precision is None or owner.fp32_precision == precision:
            continue
        # A library without a precision of its own has that of all.
        owner.fp32_precision = "none"
        if owner.fp32_precision != precision:
            owner.fp32_precision = precision


_WHOLE = ("none", "ieee", "highest")
"""Names for the whole precision of float32."""


def _lower(precision: str | None) -> str | None:
    """Return a precision below that of float32 itself, ``None`` without one."""
    return None if precision in _WHOLE else precision


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names with another precision."""
    names = {**before, **now}
    return [name for name in names if _lower(before.get(name)) != _lower(now.get(name))]


def same_precisions(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return not _changed(one, other)


# At the first call, torch 2.9 warns that the precision of products will have another name.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _FIRST_PRECISIONS = precisions()


def changed_precisions(now: Mapping[str, str]) -> str:
    names = _changed(_FIRST_PRECISIONS, now)
    return ", ".join(f"{now.get(name)} of {name}" for name in names) or "the usual one"


_LIMIT_OF_INDUCTOR = 2000


def recursion_limit() -> tuple[int, str]:
    """Return the limit, and text that differs after each graph that Inductor compiles."""
    return sys.getrecursionlimit(), graphs_of_inductor()


def set_recursion_limit(former: tuple[int, str]) -> None:
    sys.setrecursionlimit(former[0])


def limit_in_words(state: tuple[int, str]) -> str:
    return str(state[0])


def same_recursion_limits(before: tuple[int, str], after: tuple[int, str]) -> bool:
    """Return True for an equal limit, and for the limit that Inductor sets when it compiles.

    Inductor raises a lower limit to 2000, and leaves a higher one. A plugin that sets 2000 itself
    changes nothing if Inductor compiles too.
    """
    (former, graphs), (limit, later_graphs) = before, after
    if limit == former:
        return True
    return graphs != later_graphs and limit == max(former, _LIMIT_OF_INDUCTOR)


_ATEN = "aten/"
"""The beginning of the names of torch's own operators."""

_OF_A_DEVICE = ("", "Autograd", "Autocast")
"""The beginnings of the dispatch keys of a device."""

_OF_EVERY_DEVICE = (
    *("", "Autograd", "ADInplaceOrView", "Functionalize", "Python"),
    *("CompositeExplicitAutograd", "CompositeImplicitAutograd"),
)
"""The dispatch keys of kernels for every device."""


def kernels() -> Mapping[str, str]:
    """Return the kernels of torch's operators from Python code, for the devices in use.

    torch and plugins register further kernels as they are imported: for other devices, and for
    shapes alone.
    """
    return _kernels_for(_device_type(), intervening.registered_kernels())


# Python code has registered 1,800 kernels and more, and each look at the process asks.
@lru_cache(maxsize=1)
def _kernels_for(device_type: str, registered: frozenset[str]) -> Mapping[str, str]:
    devices = {"CPU", device_type.upper()}
    of_devices = (f"{layer}{device}" for layer in _OF_A_DEVICE for device in devices)
    keys = {*_OF_EVERY_DEVICE, *of_devices}
    found = {}
    for kernel in registered:
        if not kernel.startswith(_ATEN):
            continue
        name, _, key = kernel.removeprefix(_ATEN).rpartition("/")
        if key in keys:
            found[f"{name} for {key}"] = kernel
    return MappingProxyType(found)


def remove_kernel(key: str, former: object) -> None:
    name, _, dispatch_key = key.rpartition(" for ")
    intervening.remove_kernel(f"{_ATEN}{name}/{dispatch_key}")


def number_of_hooks(hooks: list[dict[int, object]]) -> str:
    return str(sum(map(len, hooks)))
