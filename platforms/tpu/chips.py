"""One chip of a host for one process."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.errors import PlatformError
from opgraft.platforms.tpu.probe import VISIBILITY_VARIABLES

_ALONE = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


def one_chip(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process sees one chip only, as libtpu reads it before it takes any.

    Args:
        local_rank: of the process among those of the host, each of which takes a chip.
        environ: of the process; chips that it hides are passed over.

    Raises:
        PlatformError: fewer chips are visible.
    """
    name = next((each for each in VISIBILITY_VARIABLES if environ.get(each)), None)
    if name is None:
        return {VISIBILITY_VARIABLES[0]: str(local_rank), **_ALONE}
    visible = [part.strip() for part in environ[name].split(",")]
    if local_rank >= len(visible):
        raise PlatformError(
            f"the worker {local_rank} of this host has no chip, as {name}={environ[name]!r} shows {len(visible)}: list "
            "a chip for each worker, or start fewer"
        )
    return {name: visible[local_rank], **_ALONE}
