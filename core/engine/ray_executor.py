"""``RayExecutor``: workers on the hosts of a Ray cluster."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

from opgraft.engine.process_executor import listening_store
from opgraft.engine.ray_placement import Placed, Placement, kill, local_ranks
from opgraft.engine.ray_worker import CHANNELS, PROGRESS, STACK, watch
from opgraft.engine.remote_executor import RemoteExecutor
from opgraft.engine.remote_workers import Started
from opgraft.engine.worker_link import WorkerLink
from opgraft.engine.worker_progress import Progress
from opgraft.errors import EngineError
from opgraft.logger import logger
from opgraft.machine.channel import Channel
from opgraft.models.extras import import_extra
from opgraft.plugins.selection import current_platform
from opgraft.text import described, printable

_TOKEN_BYTES = 32
_GREETING_BYTES = _TOKEN_BYTES + 1 + 4
_TELLING_SECONDS = 4.0
"""Seconds that Ray may take to tell that a host is lost."""
_ANSWER_SECONDS = 2.0
"""Seconds that a worker may take to tell what it does."""


class RayExecutor(RemoteExecutor):
    """Workers that Ray places on the devices of its hosts.

    Ray places and watches. Steps, results and tensors take the way that they take between processes of one host: each
    worker connects to the engine, which knows it by a secret that went through Ray.

    Args:
        opgraft_config: resolved.
    """

    def _start_workers(self) -> Started:
        ray = import_extra("ray", "ray")
        parallel = self.opgraft_config.parallel
        device = current_platform().ray_device_key
        needs = {"CPU": float(parallel.ray_cpus)} | ({device: 1.0} if device else {})
        environ = _variables(parallel.ray_cpus)
        size, seconds, replicas = self.layout.world, parallel.start_seconds, parallel.data
        placement = Placement(ray, size, needs, environ, seconds, replicas)
        with ExitStack() as undo:
            undo.callback(placement.end)
            links = self._linked(ray, placement.ranks)
            meeting = None
            if self.layout.world > 1:
                address = ray.util.get_node_ip_address()
                store, port = listening_store(address)
                meeting, held = (address, port), [store]
                undo.callback(held.clear)  # whose port is closed then
            _tell(placement.ranks, self.layout.tensor)
            # A worker sees the device alone that Ray has reserved for it.
            local = [(0, 1)] * len(links) if device else local_ranks([each.where.node for each in placement.ranks])
            return Started(links, local, meeting, undo.pop_all().close)

    def _linked(self, ray: Any, placed: Sequence[Placed]) -> list[WorkerLink]:
        """Have the actors connect, and return the links to them."""
        token, seconds = secrets.token_bytes(_TOKEN_BYTES), self.opgraft_config.parallel.start_seconds
        with socket.create_server((ray.util.get_node_ip_address(), 0), backlog=2 * len(placed)) as listening:
            place = listening.getsockname()[:2]
            running = [
                each.actor.run.remote(rank, place, token, each.where.address) for rank, each in enumerate(placed)
            ]
            found = _connections(ray, listening, token, running, seconds)
        return [RayLink(rank, connections, ray, placed[rank], running[rank]) for rank, connections in enumerate(found)]


class RayLink(WorkerLink):
    """The connections to a worker that is an actor of Ray.

    Args:
        rank: of the worker.
        connections: of the worker, in the order of ``CHANNELS``.
        ray: the module.
        placed: the actor, and where it is.
        running: what Ray gives back when the process has ended.
    """

    def __init__(self, rank: int, connections: Sequence[socket.socket], ray: Any, placed: Placed, running: Any) -> None:
        calls, beside, asking = map(Channel, connections)
        super().__init__(rank, calls, beside)
        asking.limit(_ANSWER_SECONDS)
        self._asking, self._one_asks = asking, threading.Lock()
        self.placed = placed
        self._ray, self._running = ray, running

    def ended(self, patience: float = 0.0) -> str | None:
        if not self._ray.is_initialized():  # asking would start a cluster
            return "with Ray, which was shut down"
        ended, _ = self._ray.wait([self._running], timeout=max(patience, _TELLING_SECONDS) if patience else 0)
        if not ended:
            return None
        try:
            self._ray.get(self._running, timeout=_ANSWER_SECONDS)
        except Exception as error:  # whatever Ray raises
            return f"says Ray: {printable(described(error))}"
        return "as it was told to"

    def kill(self) -> None:
        kill(self._ray, self.placed.actor)

    def hang_up(self) -> None:
        super().hang_up()
        self._asking.hang_up()  # which the actor waits for, too

    def close(self) -> None:
        super().close()
        self._asking.close()

    def progress(self) -> Progress:
        return cast(Progress, self._asked(PROGRESS, super().progress()))

    def stack(self) -> str:
        return cast(str, self._asked(STACK, super().stack()))

    def _asked(self, question: str, unknown: object) -> object:
        """Ask the worker beside what it does; it does not answer where its host is lost."""
        with self._one_asks:
            try:
                self._asking.send(question)
                return self._asking.receive()
            except (EOFError, OSError):
                self._asking.close()  # an answer that came later would be taken for another's
                return unknown


def _variables(cpus: int) -> dict[str, str]:
    """Return the variables of an actor: the threads that it has, and settings of ours that plugins may read."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("OPGRAFT_")}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cpus)), **ours}


def _connections(
    ray: Any, listening: socket.socket, token: bytes, running: Sequence[Any], seconds: float
) -> list[list[socket.socket]]:
    """Wait for the connections of all workers, and return those of each rank; others are refused.

    Raises:
        EngineError: a worker has ended, or does not connect in time.
    """
    found: dict[tuple[int, int], socket.socket] = {}
    deadline = time.monotonic() + seconds
    try:
        while len(found) < len(CHANNELS) * len(running):
            _expect_running(ray, running)
            if time.monotonic() > deadline:
                missing = sorted({rank for rank in range(len(running)) if (rank, 1) not in found})
                raise EngineError(f"the workers of ranks {missing} have not connected within {seconds:g} s")
            if select.select([listening], [], [], 0.2)[0]:
                connection, _ = listening.accept()
                place = _greeted(connection, token)
                if place is None or place in found or place[0] >= len(running) or place[1] >= len(CHANNELS):
                    connection.close()
                else:
                    found[place] = connection
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return [[found[rank, number] for number in range(len(CHANNELS))] for rank in range(len(running))]


def _expect_running(ray: Any, running: Sequence[Any]) -> None:
    ended, _ = ray.wait(list(running), timeout=0)
    if ended:
        try:
            ray.get(ended[0])
            reason = "it has ended"
        except Exception as error:  # whatever Ray raises
            reason = printable(described(error))
        raise EngineError(f"the worker of rank {list(running).index(ended[0])} does not start: {reason}")


def _greeted(connection: socket.socket, token: bytes) -> tuple[int, int] | None:
    """Return the rank and the channel that a connection is of; ``None`` for one of somebody else."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    greeting = b""
    try:
        while len(greeting) < _GREETING_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(_GREETING_BYTES - len(greeting))
            if not piece:
                return None
            greeting += piece
        watch(connection)
    except OSError:
        return None
    connection.settimeout(None)
    if not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
        logger.warning("a connection to the engine came without the secret of its workers, and was refused")
        return None
    return int.from_bytes(greeting[-4:], "little"), greeting[_TOKEN_BYTES]


def _tell(placed: Sequence[Placed], tensor: int) -> None:
    hosts = [each.where.node for each in placed]
    for rank, each in enumerate(placed):
        devices = ", ".join(f"{kind} {' '.join(ids)}" for kind, ids in each.where.devices.items()) or "processors"
        place = f"process {each.where.process} of {each.where.address}"
        logger.info("rank %d is %s, with %s", rank, printable(place), printable(devices))
    shards = [hosts[first : first + tensor] for first in range(0, len(hosts), tensor)]
    if any(len(set(each)) > 1 for each in shards):
        logger.warning(
            "ranks that share each layer are on several hosts, whose network they use in every layer: lower "
            "parallel.tensor, or let stages lie between hosts by parallel.pipeline"
        )
