"""``RayExecutor``: workers on the hosts of a Ray cluster."""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

from opgraft.base.text import described, printable
from opgraft.config.environment import deciding_variables
from opgraft.engine.workers.ray_placement import Placed, Placement, kill, local_ranks
from opgraft.engine.workers.ray_worker import CHANNELS, STACK, watch
from opgraft.engine.workers.remote_executor import RemoteExecutor
from opgraft.engine.workers.remote_workers import Started
from opgraft.engine.workers.worker_link import WorkerLink
from opgraft.engine.workers.worker_progress import Progress
from opgraft.errors import EngineError
from opgraft.logger import logger
from opgraft.machine.channel import Channel
from opgraft.models.extras import import_extra
from opgraft.plugins.selection import current_platform
from torch import distributed as dist

_TOKEN_BYTES = 32
_GREETING_BYTES = _TOKEN_BYTES + 1 + 4
_ANSWER_SECONDS = 2.0
"""Seconds that a worker may take to say who it is, and to tell its stack."""


class RayExecutor(RemoteExecutor):
    """Workers that Ray places on the devices of its hosts.

    Ray places and watches. Steps, results and tensors take the way that they take between processes
    of one host: each worker connects to the engine, which knows it by a secret that went through
    Ray.

    Args:
        opgraft_config: resolved.
    """

    def _start_workers(self) -> Started:
        ray = import_extra("ray", "ray")
        parallel = self.opgraft_config.parallel
        device = current_platform().ray_device_key
        needs = {"CPU": float(parallel.ray_cpus)}
        if device:
            needs[device] = 1.0
        environ = _variables(parallel.ray_cpus)
        size, seconds = self.layout.world, parallel.start_seconds
        replicas = 1 if parallel.data_rank is None else parallel.data
        placement = Placement(ray, size, needs, environ, seconds, replicas)
        with ExitStack() as undo:
            undo.callback(placement.end)
            links = self._linked(ray, placement.ranks)
            meeting = None
            if size > 1:
                address = ray.util.get_node_ip_address()
                store, port = listening_store(address)
                meeting, held = (address, port), [store]
                undo.callback(held.clear)  # closes the port
            _tell(placement.ranks, self.layout.tensor)
            if device:  # a worker sees the device alone that Ray has reserved
                local = [(0, 1)] * size
            else:
                nodes = [each.where.node for each in placement.ranks]
                local = local_ranks(nodes, parallel.data_rank or 0, replicas)
            return Started(links, local, meeting, undo.pop_all().close)

    def _linked(self, ray: Any, placed: Sequence[Placed]) -> list[WorkerLink]:
        """Let the actors connect, and return the links to the actors."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        seconds = self.opgraft_config.parallel.start_seconds
        address = (ray.util.get_node_ip_address(), 0)
        with socket.create_server(address, backlog=len(CHANNELS) * len(placed)) as listening:
            place = listening.getsockname()[:2]
            running = [
                each.actor.run.remote(rank, place, token, each.where.address, seconds)
                for rank, each in enumerate(placed)
            ]
            found = _connections(ray, listening, token, running, seconds)
        return [
            RayLink(rank, connections, ray, placed[rank], running[rank])
            for rank, connections in enumerate(found)
        ]


class RayLink(WorkerLink):
    """The connections to a worker that is an actor of Ray.

    Args:
        rank: of the worker.
        connections: of the worker, in the order of ``CHANNELS``.
        ray: the module.
        placed: the actor, and where it is.
        running: what Ray gives back when the process has ended.
    """

    telling_seconds = 4.0  # Ray has to notice that a host is lost

    def __init__(
        self,
        rank: int,
        connections: Sequence[socket.socket],
        ray: Any,
        placed: Placed,
        running: Any,
    ) -> None:
        calls, beside, told = map(Channel, connections)
        super().__init__(rank, calls, beside)
        told.limit(_ANSWER_SECONDS)
        self._told, self._reading = told, threading.Lock()
        self._known = super().progress()
        self._is_silent = False
        self.placed = placed
        self._ray, self._running = ray, running

    def post(self, data: memoryview) -> None:
        self.progress()  # stages that nobody reads would pile up
        super().post(data)

    def ended(self, patience: float = 0.0) -> str | None:
        if self._is_silent:
            return "or its host is cut off, which does not answer"
        if not self._ray.is_initialized():  # asking would start a cluster
            return "with Ray, which was shut down"
        ended, _ = self._ray.wait([self._running], timeout=patience)
        if not ended:
            return None
        try:
            self._ray.get(self._running, timeout=_ANSWER_SECONDS)
        except Exception as error:  # whatever Ray raises
            return f"says Ray: {printable(described(error))}"
        return "as it was told to"

    def note_silence(self) -> None:
        self._is_silent = True

    def kill(self) -> None:
        kill(self._ray, self.placed.actor)

    def hang_up(self) -> None:
        super().hang_up()
        self._told.hang_up()  # which the actor waits for, too

    def close(self) -> None:
        super().close()
        self._told.close()

    def progress(self) -> Progress:
        with self._reading, suppress(EOFError, OSError, ValueError):  # it has ended, or was closed
            while self._told.has_news:
                self._known = self._told.receive()
        return self._known

    def stack(self) -> str:
        with self._reading:
            try:
                self._told.send(STACK)
                while isinstance(found := self._told.receive(), Progress):
                    self._known = found
                return str(found)
            except (EOFError, OSError):
                self._told.close()  # an answer that came later would be taken for a stage
                return ""


def _variables(cpus: int) -> dict[str, str]:
    """Return the variables of an actor: threads, opgraft's variables, and others that decide."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("OPGRAFT_")}
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cpus)),
        **ours,
        **deciding_variables(),
    }


def _connections(
    ray: Any, listening: socket.socket, token: bytes, running: Sequence[Any], seconds: float
) -> list[list[socket.socket]]:
    """Wait for the connections of all workers, and return the connections of each rank.

    Raises:
        EngineError: a worker has ended, or does not connect in time.
    """
    expected = {(rank, number) for rank in range(len(running)) for number in range(len(CHANNELS))}
    found: dict[tuple[int, int], socket.socket] = {}
    deadline = time.monotonic() + seconds
    with ExitStack() as undo, closing(Door(listening, token)) as door:
        undo.callback(_close_all, found)
        while len(found) < len(expected):
            _expect_running(ray, running)
            if time.monotonic() > deadline:
                missing = sorted({rank for rank, _ in expected - set(found)})
                raise EngineError(
                    f"the workers of ranks {missing} have not connected within {seconds:g} s"
                )
            for place, connection in door.greeted(0.2):
                if place in expected and place not in found:
                    found[place] = connection
                else:
                    connection.close()
        undo.pop_all()
    return [
        [found[rank, number] for number in range(len(CHANNELS))] for rank in range(len(running))
    ]


def _close_all(found: Mapping[tuple[int, int], socket.socket]) -> None:
    for connection in found.values():
        connection.close()


def listening_store(address: str) -> tuple[Any, int]:
    """Return a store by which ranks meet, and the port of the store at an address of this host."""
    listening = socket.create_server((address, 0), backlog=128)
    port: int = listening.getsockname()[1]
    store = partial(dist.TCPStore, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store(address, port, master_listen_fd=listening.detach()), port


def _expect_running(ray: Any, running: Sequence[Any]) -> None:
    ended, _ = ray.wait(list(running), timeout=0)
    if ended:
        try:
            ray.get(ended[0])
            reason = "it has ended"
        except Exception as error:  # whatever Ray raises
            reason = printable(described(error))
        raise EngineError(
            f"the worker of rank {list(running).index(ended[0])} does not start: {reason}"
        )


class Door:
    """Takes connections, and reads the first words of all at once: a silent one holds up no other.

    A worker first says the secret, the number of the channel in one byte, and its rank in four
    bytes.

    Args:
        listening: where connections come.
        token: the secret of the workers.
    """

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        self._listening, self._token = listening, token
        self._waiting: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def greeted(self, seconds: float) -> list[tuple[tuple[int, int], socket.socket]]:
        """Wait for words, and return rank, channel and connection of workers.

        Strangers, and connections that are silent for too long, are closed.
        """
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        if self._listening in ready:
            self._accept()
        found = []
        for connection, (said, deadline) in list(self._waiting.items()):
            is_open = _read_into(said, connection) if connection in ready else True
            is_whole = len(said) == _GREETING_BYTES
            if is_whole and self._is_known(said):
                self._forget(connection)
                connection.setblocking(True)
                channel, rank = said[_TOKEN_BYTES], int.from_bytes(said[-4:], "little")
                found.append(((rank, channel), connection))
            elif is_whole or not is_open or time.monotonic() > deadline:
                self._forget(connection)
                connection.close()
        return found

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        connection.setblocking(False)
        watch(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        self._waiting[connection] = bytearray(), time.monotonic() + _ANSWER_SECONDS

    def _is_known(self, said: bytearray) -> bool:
        if hmac.compare_digest(said[:_TOKEN_BYTES], self._token):
            return True
        logger.warning(
            "a connection to the engine came without the secret of its workers, and was refused"
        )
        return False

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]

    def close(self) -> None:
        """Close the connections that have not said the secret."""
        for connection in self._waiting:
            connection.close()
        self._selector.close()


def _read_into(said: bytearray, connection: socket.socket) -> bool:
    """Add bytes of a greeting that have come. Return False at the end."""
    try:
        piece = connection.recv(_GREETING_BYTES - len(said))
    except OSError:
        return False
    said += piece
    return bool(piece)


def _tell(placed: Sequence[Placed], tensor: int) -> None:
    """Log where each rank is, and warn if ranks that share layers are on several hosts."""
    for rank, each in enumerate(placed):
        devices = [f"{kind} {' '.join(ids)}" for kind, ids in each.where.devices.items()]
        place = f"process {each.where.process} of {each.where.address}"
        told = ", ".join(devices) or "processors"
        logger.info("rank %d is %s, with %s", rank, printable(place), printable(told))
    hosts = [each.where.node for each in placed]
    shards = [hosts[first : first + tensor] for first in range(0, len(hosts), tensor)]
    if any(len(set(each)) > 1 for each in shards):
        logger.warning(
            "ranks that share each layer are on several hosts, whose network they use in every layer: lower "
            "parallel.tensor, or let stages lie between hosts by parallel.pipeline"
        )
