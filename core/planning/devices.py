"""Devices that are known by name, those of plugins with them, and such as somebody describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pkgutil import resolve_name

from opgraft.base.text import described, printable
from opgraft.errors import InputError, near_matches
from opgraft.logger import logger
from opgraft.machine.device_figures import DeviceFigures
from opgraft.platform import PlatformSpec
from opgraft.plugins.discovery import PLATFORM_GROUP, Offer, discover


def known_devices() -> dict[str, DeviceFigures]:
    """Return the devices that installed platforms know, by name; one that cannot be asked is logged and left out."""
    return {
        each.name: each
        for offer in discover().of_group(PLATFORM_GROUP)
        for each in _devices_of(offer)
    }


def _devices_of(offer: Offer) -> tuple[DeviceFigures, ...]:
    try:
        spec: PlatformSpec = offer.load()
        return () if spec.devices is None else tuple(resolve_name(spec.devices))
    except Exception as error:  # of somebody's plugin
        logger.warning(
            "the devices of platform %s are not known: %s", printable(offer.name), described(error)
        )
        return ()


def device_of(name: str | None, given: Mapping[str, float]) -> DeviceFigures:
    """Return the figures of a device.

    Args:
        name: of a known one, whole or its last part, such as ``v5e``; ``None`` for one that ``given`` describes.
        given: figures by the names of ``DeviceFigures``, which stand above those that are known.

    Raises:
        InputError: no device has that name, or figures are missing.
    """
    flops = {"flops": {"": given["flops"]}} if "flops" in given else {}
    figures = {key: value for key, value in given.items() if key != "flops"}
    if name is None:
        missing = [f"--{key}" for key in ("memory", "bandwidth") if key not in given]
        if missing:
            raise InputError(
                f"{' and '.join(missing)} of a device {'is' if len(missing) == 1 else 'are'} not given: name one by "
                f"--device, which knows {', '.join(known_devices())}, or give --memory 80GiB and --bandwidth 3.35TB/s"
            )
        base = DeviceFigures("as given", 0.0, 0.0, source="the command line")
    else:
        base = _known(name)
    return dataclasses.replace(base, **figures, **flops)  # type: ignore[arg-type]  # by the names of its fields


def _known(name: str) -> DeviceFigures:
    known = known_devices()
    found = known.get(name.lower()) or next(
        (known[each] for each in known if each.endswith(f"-{name.lower()}")), None
    )
    if found is None:
        near = near_matches(name.lower(), known)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise InputError(
            f"no device is known as {name!r:.60}{meant}: give one of {', '.join(known)}, or --memory and --bandwidth"
        )
    return found
