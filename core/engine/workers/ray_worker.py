"""The actor that Ray starts for a worker: it tells where it is, and becomes the worker's process."""

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

from opgraft.engine.workers.worker_process import serve_calls
from opgraft.engine.workers.worker_progress import Progress, thread_name
from opgraft.machine.channel import Channel
from opgraft.machine.interfaces import interface_of

CHANNELS = ("calls", "beside", "progress")
"""The connections of a worker, in the order in which it makes them."""

STACK = "stack"
"""The question that the last of them brings."""

SILENT_SECONDS = 4
"""Seconds after which a host that does not answer is lost."""


class Where(NamedTuple):
    """The place that Ray has given to an actor.

    Attributes:
        node: Ray's id of the host.
        address: of the host.
        process: id of the actor's process there.
        devices: ids of the devices that Ray reserves for the actor, by Ray's name for their kind.
    """

    node: str
    address: str
    process: int
    devices: Mapping[str, Sequence[str]]


class RayWorker:
    """An actor with one device."""

    def where(self) -> Where:
        """Return where the actor is."""
        ray: Any = importlib.import_module("ray")
        context = ray.get_runtime_context()
        found = {kind: tuple(ids) for kind, ids in context.get_accelerator_ids().items() if ids}
        return Where(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), found)

    def run(
        self, rank: int, engine: tuple[str, int], token: bytes, address: str, seconds: float
    ) -> None:
        """Connect to the engine, and be the process of a worker until the engine closes the connections.

        Args:
            rank: of the worker.
            engine: host and port where it listens.
            token: by which the engine knows its own workers.
            address: of this host.
            seconds: in which a connection is made.
        """
        interface = interface_of(address)
        if interface:  # gloo would take the address of the host's name, which others need not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        connections = [connected(engine, seconds) for _ in CHANNELS]
        for number, connection in enumerate(connections):
            connection.sendall(token + bytes((number,)) + rank.to_bytes(4, "little"))
        calls, beside, telling = connections
        teller = Teller(Channel(telling))
        # Ray ends an actor that nobody wants any more.
        serve_calls(calls.detach(), beside.detach(), teller.note, ends_process=False)
        teller.join()


class Teller:
    """Tells each stage that the worker comes to, as one that hangs may not answer; and its stack where it is asked.

    Args:
        channel: by which the engine reads stages, at each call at the latest, and asks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._thread = threading.main_thread()
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self._answering.start()

    def join(self) -> None:
        """Wait until the engine asks no more."""
        self._answering.join()

    def note(self, progress: Progress) -> None:
        """Tell what the worker does now."""
        with suppress(OSError):  # the engine has closed it
            self._channel.send(progress)

    def _answer(self) -> None:
        with suppress(EOFError, OSError):  # the engine has closed it
            while self._channel.receive() == STACK:
                self._channel.send(self._stack())
        self._channel.close()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join([f"{thread_name('self')}\n", *traceback.format_stack(frame)])


def connected(engine: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to the engine.

    Args:
        engine: host and port where it listens.
        seconds: after which that fails.
    """
    connection = socket.create_connection(engine, seconds)
    connection.settimeout(None)
    watch(connection)
    return connection


def watch(connection: socket.socket) -> None:
    """Have a connection send at once, and fail within seconds where the other host is gone without a word.

    What is sent and not acknowledged counts as silence, and so does what the other process does not
    read.
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
        if hasattr(socket, name):  # systems differ
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
