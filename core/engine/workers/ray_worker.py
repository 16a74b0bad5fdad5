"""The actor of Ray for a worker: tells its place, and becomes the worker's process."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from opgraft.binding.pluggable_class import choose_class
from opgraft.config import OpgraftConfig, set_config
from opgraft.engine.workers.engine_digest import ENGINE
from opgraft.engine.workers.worker import Worker
from opgraft.engine.workers.worker_process import serve_calls
from opgraft.engine.workers.worker_progress import Progress, thread_name
from opgraft.machine.channel import Channel
from opgraft.machine.interfaces import interface_of
from opgraft.plugins.host import load_plugins

CHANNELS = ("calls", "beside", "progress")
"""The connections of a worker, in the order of connecting."""

STACK = "stack"
"""The engine's question on the last connection."""

SILENT_SECONDS = 4
"""A host that does not answer for so many seconds is lost."""


class Where(NamedTuple):
    """The place of an actor.

    Attributes:
        node: Ray's id of the host.
        address: the address of the host.
        process: the id of the actor's process on the host.
        devices: Ray's name for a kind of device → ids of the devices reserved for the actor.
        host_number: the number of the host among the hosts of the devices.
    """

    node: str
    address: str
    process: int
    devices: Mapping[str, Sequence[str]]
    host_number: int = 0


class RayWorker:
    """An actor with one device."""

    def where(self, opgraft_config: OpgraftConfig) -> Where:
        """Return the place of the actor.

        Args:
            opgraft_config: the settings of the engine. Plugins are loaded with them, once for the
                process.
        """
        ray: Any = importlib.import_module("ray")
        context = ray.get_runtime_context()
        found = {kind: tuple(ids) for kind, ids in context.get_accelerator_ids().items() if ids}
        with set_config(opgraft_config, origin=ENGINE):
            load_plugins()
            worker: type[Worker] = choose_class(Worker).cls
            host_number = worker.host_number()
        return Where(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            found,
            host_number,
        )

    def run(
        self, rank: int, engine: tuple[str, int], token: bytes, address: str, seconds: float
    ) -> None:
        """Connect to the engine, and be the process of a worker until the engine hangs up.

        Args:
            rank: the rank of the worker.
            engine: host and port of the engine.
            token: the secret of the engine's workers.
            address: the address of this host.
            seconds: the time limit for a connection.
        """
        interface = interface_of(address)
        if interface:
            # gloo would take the address of the host's name, which others may not reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        connections = [connected(engine, seconds) for _ in CHANNELS]
        for number, connection in enumerate(connections):
            connection.sendall(token + bytes((number,)) + rank.to_bytes(4, "little"))
        calls, beside, telling = connections
        teller = Teller(Channel(telling))
        # Ray ends an actor without a reference.
        serve_calls(calls.detach(), beside.detach(), teller.note, ends_process=False)
        teller.join()


class Teller:
    """Sends each stage of the worker to the engine, and the stack if the engine asks.

    Stages are sent unasked, as a worker that hangs may not answer.

    Args:
        channel: the connection. The engine reads stages at each call.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._thread = threading.main_thread()
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self._answering.start()

    def join(self) -> None:
        """Wait until the engine closes the connection."""
        self._answering.join()

    def note(self, progress: Progress) -> None:
        """Send the stage of the worker."""
        # The engine may have closed the connection.
        with suppress(OSError):
            self._channel.send(progress)

    def _answer(self) -> None:
        with suppress(EOFError, OSError):
            while self._channel.receive() == STACK:
                self._channel.send(self._stack())
        self._channel.close()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join([f"{thread_name('self')}\n", *traceback.format_stack(frame)])


def connected(engine: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to the engine.

    Args:
        engine: host and port of the engine.
        seconds: the time limit.
    """
    connection = socket.create_connection(engine, seconds)
    connection.settimeout(None)
    watch(connection)
    return connection


def watch(connection: socket.socket) -> None:
    """Make a connection send at once, and fail within seconds if the other host is silent.

    A host is silent if it acknowledges no data, or if the other process does not read.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENT_SECONDS - 1,
        "TCP_USER_TIMEOUT": SILENT_SECONDS * 1000,
    }
    for name, value in limits.items():
        # Some systems lack some of these options.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
