"""A look at what takes part in calls of others: traces, hooks of every module, modes, kernels of torch's operators."""

from __future__ import annotations

import gc
import operator
import reprlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from opgraft.compat import intervening
from opgraft.plugins.changes import Change, Value, attribute, very_same
from opgraft.registry.state import host_state

_ENABLED = "_sdp_enabled"
"""The end of the names of what tells whether torch may compute attention in some way."""


class Kernels:
    """Kernels of torch's own operators for the devices that are used here, which nobody but who brings them can remove.

    Those for other devices, and for shapes alone, are what torch and plugins of devices register as they are imported.
    """

    def read(self) -> frozenset[str]:
        return intervening.registered_kernels()

    def changes(self, before: frozenset[str], after: frozenset[str]) -> Iterator[Change]:
        selection = host_state().selection
        devices = {"CPU", selection.platform.device_type.upper() if selection else "CPU"}
        keys = {"Autograd"} | {f"{what}{device}" for what in ("", "Autograd") for device in devices}
        for kernel in sorted(after - before):
            namespace, _, rest = kernel.partition("/")
            name, _, key = rest.rpartition("/")
            if namespace == "aten" and key in keys:
                yield Change(
                    f"the kernel of torch's operator {name} for {key}", _cannot_remove, patch=True
                )


def _cannot_remove() -> None:
    raise RuntimeError("it lasts as long as the library object that has registered it")


def values() -> Iterator[Value]:
    """Yield what torch and Python call with whatever others do, and the switches of how they do it."""
    hooks = intervening.hooks_of_every_module, intervening.set_hooks_of_every_module
    yield Value("the hooks that torch calls for every module", *hooks, _count)
    yield Value(
        "the modes of torch",
        intervening.entered_modes,
        intervening.leave_other_modes,
        _kinds,
        very_same,
    )
    for module, whose in ((sys, "this thread"), (threading, "new threads")):
        for what in ("trace", "profile"):
            read, write = getattr(module, f"get{what}"), getattr(module, f"set{what}")
            yield Value(
                f"what {what}s the functions of {whose}", read, write, reprlib.repr, operator.is_
            )
    for owner in (sys, threading):
        yield Value(
            f"{owner.__name__}.excepthook",
            *attribute(owner, "excepthook"),
            reprlib.repr,
            operator.is_,
        )
    yield Value("sys.unraisablehook", *attribute(sys, "unraisablehook"), reprlib.repr, operator.is_)
    yield Value("whether garbage is collected", gc.isenabled, _collect)
    yield Value("the thresholds of the garbage collector", gc.get_threshold, _set_thresholds)
    yield Value(
        "the time after which threads take turns", sys.getswitchinterval, sys.setswitchinterval
    )
    for backend in (
        value for value in vars(torch.backends).values() if isinstance(value, ModuleType)
    ):
        for name in [
            name for name in vars(backend) if name.endswith(_ENABLED)
        ]:  # of one, and they hold everywhere
            way = name.removesuffix(_ENABLED)
            read, write = getattr(backend, name), getattr(backend, f"enable_{way}_sdp")
            yield Value(f"whether attention may be computed by {way}", read, write)


def _count(hooks: list[dict[int, Any]]) -> str:
    return str(sum(map(len, hooks)))


def _kinds(modes: list[Any]) -> str:
    return ", ".join(type(mode).__name__ for mode in modes) or "none"


def _collect(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def _set_thresholds(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)
