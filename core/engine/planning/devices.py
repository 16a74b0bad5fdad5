"""The figures of devices: known by name, from plugins too, or described by the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.errors import InputError, near_matches
from opgraft.machine.device_figures import DeviceFigures
from opgraft.platform import PlatformSpec
from opgraft.plugins.discovery import PLATFORM_GROUP, Offer, discover


def known_devices() -> dict[str, DeviceFigures]:
    """Return the devices of installed platforms by name.

    The devices of a platform that raises are left out, and the error is logged.
    """
    found = {}
    for offer in discover().of_group(PLATFORM_GROUP):
        for device in _devices_of(offer):
            found[device.name] = device
    return found


def _devices_of(offer: Offer) -> tuple[DeviceFigures, ...]:
    """Return the devices of a platform; none if the platform raises."""
    try:
        spec: PlatformSpec = offer.load()
        return () if spec.devices is None else tuple(resolve_name(spec.devices))
    # A plugin may raise anything.
    except Exception as error:
        logger.warning(
            "the devices of platform %s are not known: %s", printable(offer.name), described(error)
        )
        return ()


def device_of(name: str | None, given: Mapping[str, float]) -> DeviceFigures:
    """Return the figures of a device.

    Args:
        name: the name of a known device, or the last part of the name, such as ``v5e``; ``None``
            for a device that ``given`` describes.
        given: figures by the names of ``DeviceFigures``. They replace known figures.

    Raises:
        InputError: no device has that name, or figures are missing.
    """
    figures: dict[str, Any] = dict(given)
    if "flops" in figures:
        # One figure for all dtypes.
        figures["flops"] = {"": figures["flops"]}
    base = _base_of_description(given) if name is None else _known_device(name)
    return dataclasses.replace(base, **figures)


def _base_of_description(given: Mapping[str, float]) -> DeviceFigures:
    """Return figures for a device that the user describes.

    Raises:
        InputError: a figure that every device needs is missing.
    """
    missing = [f"--{key}" for key in ("memory", "bandwidth") if key not in given]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{' and '.join(missing)} of a device {verb} not given: name one by --device, which "
            f"knows {', '.join(known_devices())}, or give --memory 80GiB and --bandwidth 3.35TB/s"
        )
    return DeviceFigures("as given", 0.0, 0.0, source="the command line")


def _known_device(name: str) -> DeviceFigures:
    known = known_devices()
    lower = name.lower()
    # A whole name counts more than the last part of another name.
    if lower in known:
        return known[lower]
    for each, figures in known.items():
        if each.endswith(f"-{lower}"):
            return figures
    near = near_matches(lower, known)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise InputError(
        f"no device is known as {name!r:.60}{meant}: give one of {', '.join(known)}, or --memory "
        "and --bandwidth"
    )
