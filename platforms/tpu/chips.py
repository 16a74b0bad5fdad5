"""One chip of a host for one process."""

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
    set_variables = [name for name in VISIBILITY_VARIABLES if environ.get(name)]
    if not set_variables:
        return {VISIBILITY_VARIABLES[0]: str(local_rank), **_ALONE}
    name = set_variables[0]
    visible = [part.strip() for part in environ[name].split(",")]
    if local_rank >= len(visible):
        raise PlatformError(
            f"the worker {local_rank} of this host has no chip, as {name}={environ[name]!r} shows "
            f"{len(visible)}: list a chip for each worker, or start fewer"
        )
    return {name: visible[local_rank], **_ALONE}
