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
from itertools import product
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.config.environment import deciding_variables
from opgraft.engine.workers.ray_placement import PlacedActor, Placement, kill, local_ranks
from opgraft.engine.workers.ray_worker import CHANNELS, STACK, watch
from opgraft.engine.workers.remote_executor import RemoteExecutor
from opgraft.engine.workers.remote_workers import StartedWorkers
from opgraft.engine.workers.worker_link import WorkerLink
from opgraft.engine.workers.worker_progress import Progress
from opgraft.errors import EngineError
from opgraft.machine.channel import Channel
from opgraft.models.extras import import_extra
from opgraft.plugins.selection import current_platform
from torch import distributed as dist

_TOKEN_BYTES = 32
_GREETING_BYTES = _TOKEN_BYTES + 1 + 4
_ANSWER_SECONDS = 2.0
"""Seconds for a worker to send its greeting, or its stack."""


class RayExecutor(RemoteExecutor):
    """Workers that Ray places on the devices of its hosts.

    Ray places and watches the workers. Steps, results and tensors do not pass through Ray: each
    worker connects to the engine, as between processes of one host. A secret that the engine sends
    through Ray proves that the worker is the engine's own.

    Args:
        opgraft_config: resolved.
    """

    def _start_workers(self) -> StartedWorkers:
        ray = import_extra("ray", "ray")
        parallel = self.opgraft_config.parallel
        device = current_platform().ray_device_key
        size = self.layout.world
        # An engine that knows its replica shares the hosts with the other replicas.
        replicas = 1 if parallel.data_rank is None else parallel.data
        placement = self._placement(ray, device, replicas)
        with ExitStack() as undo:
            undo.callback(placement.end)
            links = self._connected_links(ray, placement.ranks)
            meeting = _meeting(ray, undo) if size > 1 else None
            _log_places(placement.ranks, self.layout.tensor)
            places = [each.where for each in placement.ranks]
            reserved: tuple[str, ...] = ()
            if device:
                # A worker sees no device but the one that Ray has reserved.
                local = [(0, 1)] * size
                reserved = tuple(place.devices[device][0] for place in places)
            else:
                local = self._local_ranks(placement, replicas)
            hosts = tuple(place.address for place in places)
            return StartedWorkers(links, local, meeting, undo.pop_all().close, hosts, reserved)

    def _local_ranks(self, placement: Placement, replicas: int) -> list[tuple[int, int]]:
        nodes = [each.where.node for each in placement.ranks]
        return local_ranks(nodes, self.opgraft_config.parallel.data_rank or 0, replicas)

    def _placement(self, ray: Any, device: str | None, replicas: int) -> Placement:
        """Have Ray place the workers, each with processors and one device."""
        parallel = self.opgraft_config.parallel
        needs = {"CPU": float(parallel.ray_cpus)}
        if device:
            needs[device] = 1.0
        return Placement(
            ray,
            self.opgraft_config,
            self.layout.world,
            needs,
            _variables(parallel.ray_cpus),
            parallel.start_seconds,
            replicas,
        )

    def _connected_links(self, ray: Any, placed: Sequence[PlacedActor]) -> list[WorkerLink]:
        """Let the actors connect, and return the links to the actors."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        seconds = self.opgraft_config.parallel.start_seconds
        address = (ray.util.get_node_ip_address(), 0)
        with socket.create_server(address, backlog=len(CHANNELS) * len(placed)) as listening:
            engine = listening.getsockname()[:2]
            running = []
            for rank, each in enumerate(placed):
                run = each.actor.run.remote(rank, engine, token, each.where.address, seconds)
                running.append(run)
            found = _connections(ray, listening, token, running, seconds)
        return [
            RayLink(rank, connections, ray, placed[rank], running[rank])
            for rank, connections in enumerate(found)
        ]


def _meeting(ray: Any, undo: ExitStack) -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    store, port = listening_store(address)
    held = [store]
    # The last reference closes the port.
    undo.callback(held.clear)
    return address, port


class RayLink(WorkerLink):
    """The connections to a worker that is an actor of Ray.

    Args:
        rank: the rank of the worker.
        connections: the worker's connections, in the order of ``CHANNELS``.
        ray: the module.
        placed: the actor and its place.
        running: Ray's reference to the running method of the actor.
    """

    # Ray needs this time to notice that a host is lost.
    telling_seconds = 4.0

    def __init__(
        self,
        rank: int,
        connections: Sequence[socket.socket],
        ray: Any,
        placed: PlacedActor,
        running: Any,
    ) -> None:
        calls, beside, told = map(Channel, connections)
        super().__init__(rank, calls, beside)
        told.limit(_ANSWER_SECONDS)
        self._told = told
        self._reading = threading.Lock()
        self._known = super().progress()
        self._is_silent = False
        self.placed = placed
        self._ray = ray
        self._running = running

    def post(self, data: memoryview) -> None:
        # Unread stages would fill the connection.
        self.progress()
        super().post(data)

    def ended(self, patience: float = 0.0) -> str | None:
        if self._is_silent:
            return "or its host is cut off, which does not answer"
        # Without a cluster, the call of ray.wait would start one.
        if not self._ray.is_initialized():
            return "with Ray, which was shut down"
        ended, _ = self._ray.wait([self._running], timeout=patience)
        if not ended:
            return None
        try:
            self._ray.get(self._running, timeout=_ANSWER_SECONDS)
        # Ray raises the error of the actor, of any class.
        except Exception as error:
            return f"says Ray: {printable(described(error))}"
        return "as it was told to"

    def note_silence(self) -> None:
        self._is_silent = True

    def kill(self) -> None:
        kill(self._ray, self.placed.actor)

    def hang_up(self) -> None:
        super().hang_up()
        # The actor waits for the end of this channel, too.
        self._told.hang_up()

    def close(self) -> None:
        super().close()
        self._told.close()

    def progress(self) -> Progress:
        # The channel of a worker that has ended, or was closed, has no news.
        with self._reading, suppress(EOFError, OSError, ValueError):
            while self._told.has_news:
                self._known = self._told.receive()
        return self._known

    def stack(self) -> str:
        with self._reading:
            try:
                self._told.send(STACK)
                answer = self._told.receive()
                # Stages may come before the answer.
                while isinstance(answer, Progress):
                    self._known = answer
                    answer = self._told.receive()
                return str(answer)
            except (EOFError, OSError):
                # A late answer would be taken for a stage.
                self._told.close()
                return ""


def _variables(cpus: int) -> dict[str, str]:
    """Return environment variables for an actor: threads, opgraft's, and others with an effect."""
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
    ranks = range(len(running))
    channels = range(len(CHANNELS))
    expected = set(product(ranks, channels))
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
    return [[found[rank, channel] for channel in channels] for rank in ranks]


def _close_all(found: Mapping[tuple[int, int], socket.socket]) -> None:
    for connection in found.values():
        connection.close()


def listening_store(address: str) -> tuple[Any, int]:
    """Return a store through which ranks meet at an address of this host, and the store's port."""
    listening = socket.create_server((address, 0), backlog=128)
    port: int = listening.getsockname()[1]
    # The module has the class only if torch was built with distributed support.
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def _expect_running(ray: Any, running: Sequence[Any]) -> None:
    """Raise if a worker has ended.

    Raises:
        EngineError: a worker has ended. The message has its rank and the reason.
    """
    ended, _ = ray.wait(list(running), timeout=0)
    if not ended:
        return
    try:
        ray.get(ended[0])
        reason = "it has ended"
    # Ray raises the error of the actor, of any class.
    except Exception as error:
        reason = printable(described(error))
    rank = list(running).index(ended[0])
    raise EngineError(f"the worker of rank {rank} does not start: {reason}")


class Door:
    """Accepts connections, and reads the greetings of all connections at the same time.

    A silent connection delays no other. A greeting has the secret, the number of the channel in one
    byte, and the rank in four bytes.

    Args:
        listening: the socket that accepts connections.
        token: the secret of the workers.
    """

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        self._listening = listening
        self._token = token
        self._waiting: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def greeted(self, seconds: float) -> list[tuple[tuple[int, int], socket.socket]]:
        """Wait for greetings, and return rank, channel and connection of each greeting.

        Connections with a wrong secret, and connections that are silent for too long, are closed.
        """
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        if self._listening in ready:
            self._accept()
        found = []
        for connection, (words, deadline) in list(self._waiting.items()):
            is_open = _read_into(words, connection) if connection in ready else True
            is_whole = len(words) == _GREETING_BYTES
            if is_whole and self._is_known(words):
                self._forget(connection)
                connection.setblocking(True)
                channel = words[_TOKEN_BYTES]
                rank = int.from_bytes(words[-4:], "little")
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
        deadline = time.monotonic() + _ANSWER_SECONDS
        self._waiting[connection] = (bytearray(), deadline)

    def _is_known(self, words: bytearray) -> bool:
        # The comparison takes the same time for every secret.
        if hmac.compare_digest(words[:_TOKEN_BYTES], self._token):
            return True
        logger.warning(
            "a connection to the engine came without the secret of its workers, and was refused"
        )
        return False

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]

    def close(self) -> None:
        """Close the connections without a greeting."""
        for connection in self._waiting:
            connection.close()
        self._selector.close()


def _read_into(words: bytearray, connection: socket.socket) -> bool:
    """Add the bytes of a greeting that have come. The result is False for a closed connection."""
    try:
        piece = connection.recv(_GREETING_BYTES - len(words))
    except OSError:
        return False
    words += piece
    return bool(piece)


def _log_places(placed: Sequence[PlacedActor], tensor: int) -> None:
    """Log the place of each rank, and warn if ranks that share layers are on several hosts."""
    for rank, each in enumerate(placed):
        devices = [f"{kind} {' '.join(ids)}" for kind, ids in each.where.devices.items()]
        place = f"process {each.where.process} of {each.where.address}"
        told = ", ".join(devices) or "processors"
        logger.info("rank %d is %s, with %s", rank, printable(place), printable(told))
    hosts = [each.where.node for each in placed]
    shards = [hosts[first : first + tensor] for first in range(0, len(hosts), tensor)]
    if any(len(set(each)) > 1 for each in shards):
        logger.warning(
            "ranks that share each layer are on several hosts, whose network they use in every "
            "layer: lower parallel.tensor, or let stages lie between hosts by parallel.pipeline"
        )
