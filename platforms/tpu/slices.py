"""The processes of a slice: one for each chip, on all hosts of the slice.

Both packages use libtpu, which reads the variables of a slice at its first use. torch_tpu reads two
more with the same meaning, and the variables of a launcher. Sources: ``configure_topology`` of
torch_xla 2.9, and ``torch_tpu/_internal/distributed/distributed.py`` of torch_tpu 0.2.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from opgraft.base.text import printable
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.errors import PlatformError
from opgraft.platforms.tpu.chips import chip_of

FIRST_PORT = 8476
"""libtpu's own port. The process of chip 3 listens three ports later."""

TOPOLOGY = "TPU_TOPOLOGY"
"""The chips of a slice in each dimension, such as 2x4. GKE and the operator of Ray set it."""

WORKER_ID = "TPU_WORKER_ID"
"""The number of a host in its slice."""

HOST_NAMES = "TPU_WORKER_HOSTNAMES"
"""The hosts of a slice in the order of their numbers, separated by commas."""

_BOUNDS = (
    ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"),
    ("TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
)
"""The new and the old names of libtpu: processes of a slice, and chips of a process."""

_OF_ONE_HOST = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Chips of a host → mesh. Hosts of v4 and v5p have four chips, so eight are v5e or v6e."""

Mesh = tuple[int, ...]


def slice_variables(places: RankPlaces, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for one process of a slice, with one chip.

    Args:
        places: the hosts and chips of all processes.
        environ: of this process. It may describe the slice.

    Raises:
        PlatformError: a process has no chip, the hosts are unknown, or the processes are not those
            of a whole slice.
    """
    hosts = _hosts(places, environ)
    mesh = _mesh(hosts, environ)
    bounds = ",".join(map(str, mesh))
    chips_of_all = _chips(places, environ)
    chip = chips_of_all[places.rank]
    found = {"TPU_VISIBLE_CHIPS": chip, "TORCH_TPU_TOPOLOGY": bounds}
    for processes, chips in _BOUNDS:
        found[processes] = bounds
        found[chips] = "1,1,1"
    return found | _addresses(places, hosts, environ) | _numbers(places, hosts)


def _addresses(
    places: RankPlaces, hosts: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    chips = _chips(places, environ)
    ports = [str(FIRST_PORT + _number_of_chip(chip)) for chip in chips]
    pairs = zip(hosts, ports, strict=True)
    text = ",".join(f"{host}:{port}" for host, port in pairs)
    return {
        "TPU_PROCESS_ADDRESSES": text,
        "TPU_PROCESS_PORT": ports[places.rank],
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": text,
    }


def _numbers(places: RankPlaces, hosts: Sequence[str]) -> dict[str, str]:
    """Return the numbers of a process in the slice and on its host."""
    rank = str(places.rank)
    own = hosts[places.rank]
    on_host = [each for each, host in enumerate(hosts) if host == own]
    number = str(on_host.index(places.rank))
    return {
        "CLOUD_TPU_TASK_ID": rank,
        "RANK": rank,
        "WORLD_SIZE": str(places.size),
        "PJRT_LOCAL_PROCESS_RANK": number,
        "LOCAL_RANK": number,
        "PJRT_LOCAL_PROCESS_COUNT": str(len(on_host)),
    }


def _chips(places: RankPlaces, environ: Mapping[str, str]) -> Sequence[str]:
    return places.devices or [chip_of(number, environ) for number in places.local_ranks]


def host_number(environ: Mapping[str, str]) -> int:
    """Return the number of this host in its slice, 0 for a host alone.

    Raises:
        PlatformError: the variable is no number.
    """
    text = environ.get(WORKER_ID) or "0"
    if not text.isdecimal():
        raise PlatformError(
            f"{WORKER_ID}={text!r:.80} is no number of a host: unset it, or set it to the number "
            "of this host in its slice"
        )
    return int(text)


def _hosts(places: RankPlaces, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the address of each process's host. A launcher tells none of several hosts."""
    if all(places.hosts):
        return places.hosts
    parts = environ.get(HOST_NAMES, "").split(",")
    names = [part.strip() for part in parts if part.strip()]
    size = places.size
    # A launcher starts as many processes on each host.
    on_each = max(places.local_ranks) + 1
    count = size // on_each
    if len(names) != count:
        raise PlatformError(
            f"{size} processes with {on_each} on each host are on {count} hosts, and "
            f"{HOST_NAMES} names {len(names)}: set it to the "
            "names of all hosts of the slice, separated by commas, in the order of their numbers, "
            "and LOCAL_WORLD_SIZE to the number of processes on each host"
        )
    hosts = [name for name in names for _ in range(on_each)]
    return tuple(hosts)


def _mesh(hosts: tuple[str, ...], environ: Mapping[str, str]) -> Mesh:
    """Return the mesh of the slice.

    Raises:
        PlatformError: no variable describes a slice with so many chips, and the chips are on
            several hosts or form no mesh.
    """
    size = len(hosts)
    count = len(set(hosts))
    described = _described(environ)
    # Ray describes a slice of one chip to each of its actors.
    for mesh in described.values():
        if math.prod(mesh) == size:
            return mesh
    if count == 1 and size in _OF_ONE_HOST:
        return _OF_ONE_HOST[size]
    if count == 1:
        counts = ", ".join(map(str, _OF_ONE_HOST))
        raise PlatformError(
            f"{size} workers have a chip each, and {size} chips of a host form no mesh: start "
            f"one of {counts} workers"
        )
    told = [f"{name} says {math.prod(mesh)}" for name, mesh in described.items()]
    known = "; ".join(told) or "no variable describes the slice"
    raise PlatformError(
        f"{size} workers on {count} hosts have a chip each, and libtpu starts only with a process "
        f"for every chip of a slice ({known}): set "
        f"parallel.tensor to the number of chips, and {TOPOLOGY}, such as 2x4, on every host"
    )


def _described(environ: Mapping[str, str]) -> dict[str, Mesh]:
    """Return the mesh of the slice from each variable, or pair of variables, that is set."""
    found = {}
    topology = environ.get(TOPOLOGY, "")
    if topology:
        sizes = topology.replace("x", ",")
        found[TOPOLOGY] = _parsed(TOPOLOGY, sizes)
    for processes, chips in _BOUNDS:
        if environ.get(processes) and environ.get(chips):
            outer = _parsed(processes, environ[processes])
            inner = _parsed(chips, environ[chips])
            pairs = zip(outer, inner, strict=True)
            found[processes] = tuple(a * b for a, b in pairs)
    return found


def _parsed(name: str, text: str) -> Mesh:
    parts = [part.strip() for part in text.split(",")]
    are_sizes = all(part.isdecimal() and int(part) for part in parts)
    if not are_sizes or len(parts) > 3:
        raise PlatformError(
            f"{name} is {printable(text)!r:.80}: expected up to three numbers, such as 2,2,1"
        )
    sizes = [int(part) for part in parts]
    missing = 3 - len(sizes)
    return (*sizes, *(1,) * missing)


def _number_of_chip(chip: str) -> int:
    if not chip.isdecimal():
        raise PlatformError(f"a chip has the id {printable(chip)!r:.80}: expected a number")
    return int(chip)
