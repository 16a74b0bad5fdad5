"""Fixture machines, each built once per session, and the probes of the built-in platforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from opgraft.machine.evidence import Evidence
from opgraft.machine.machine import Machine
from opgraft.plugins.discovery import PLATFORM_GROUP, scan
from support.machines.build import build

Probe = Callable[[Machine], Evidence]


@pytest.fixture(scope="session")
def machine_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a fixture machine, by its name; to be read only."""
    folder = tmp_path_factory.mktemp("machines")
    return cache(lambda name: build(name, folder / name))


@pytest.fixture(scope="session")
def built_in_probes() -> dict[str, Probe]:
    """Every built-in platform's probe, found as the host finds it."""
    offers = (offer for offer in scan().of_group(PLATFORM_GROUP) if offer.built_in)
    return {offer.name: offer.load().probe for offer in offers}
