"""The chips of a host for its processes."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.errors import PlatformError
from opgraft.platforms.tpu.probe import VISIBILITY_VARIABLES

_ALONE = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


def one_chip(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process with one chip. libtpu reads them at the first use.

    Args:
        local_rank: of the process on this host. Each process takes a chip.
        environ: of the process. Hidden chips are passed over.

    Raises:
        PlatformError: fewer chips are visible.
    """
    name = _variable(environ)
    chip = chip_of(local_rank, environ)
    return {name: chip, **_ALONE}


def chip_of(local_rank: int, environ: Mapping[str, str]) -> str:
    """Return the id of a process's chip: see ``one_chip``.

    Raises:
        PlatformError: fewer chips are visible.
    """
    name = _variable(environ)
    if not environ.get(name):
        return str(local_rank)
    visible = [part.strip() for part in environ[name].split(",")]
    if local_rank >= len(visible):
        raise PlatformError(
            f"the worker {local_rank} of this host has no chip, as {name}={environ[name]!r} shows "
            f"{len(visible)}: list a chip for each worker, or start fewer"
        )
    return visible[local_rank]


def _variable(environ: Mapping[str, str]) -> str:
    """Return the first visibility variable with a value, else the first one."""
    for name in VISIBILITY_VARIABLES:
        if environ.get(name):
            return name
    return VISIBILITY_VARIABLES[0]
