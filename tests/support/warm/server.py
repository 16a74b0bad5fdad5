"""The server of ``interpreter.py``: it imports, waits, and forks a process for each request."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import marshal
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import types
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import opgraft
from opgraft.plugins.definitions import DEFINITIONS
from opgraft.testing import proof_records

PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.tensor", "numpy"),
    *("importlib_metadata", "pluggy", "click", "rich.console", "rich.table"),
    *("packaging.requirements", "packaging.tags"),
    *(
        "opgraft.cli.detect",
        "opgraft.cli.ops",
        "opgraft.cli.plugins_doctor",
        "opgraft.cli.plugins_show",
    ),
    *("opgraft.cli.run_model", "opgraft.cli.run", "opgraft.cli.chat", "opgraft.cli.serve"),
    *("opgraft.cli.op_table", "opgraft.cli.op_explanation", "opgraft.cli.plugins"),
    *("opgraft.cli.ops_list", "opgraft.cli.ops_explain"),
    *("opgraft.engine.planning.splits", "opgraft.testing.diagnosis"),
    *("opgraft.plugins.definitions", "opgraft.plugins.guarding", "opgraft.plugins.process"),
    *(f"opgraft.platforms.{name}" for name in ("cuda", "rocm", "tpu", "xpu")),
    *("opgraft.platforms.cuda.gpus", "opgraft.platforms.rocm.kfd"),
    *("opgraft.engine.workers.worker_process", "opgraft.platforms.cpu.platform"),
)
IF_INSTALLED = (
    *(
        "pytest",
        "transformers",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.modeling_auto",
    ),
    *(
        "safetensors.torch",
        "tokenizers",
        "fastapi",
        "uvicorn.protocols.http.httptools_impl",
        "llguidance",
    ),
    "opgraft.serving.server.run",
)

STREAMS = (("stdin", "r", "strict"), ("stdout", "w", "strict"), ("stderr", "w", "backslashreplace"))
KEPT: list[Any] = []
"""The server's streams, whose files would be closed with them."""


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request, and the open files that came with it."""
    head, files, *_ = socket.recv_fds(connection, 8, 250)
    if not head:
        raise ConnectionError("the client was killed before it asked")
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the client ended before it had asked")
        data += part
    return marshal.loads(data), files  # noqa: S302  # of these tests


class Server:
    """Forks a process for each request, tells its client how it ended, and ends it if the client is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.poll = select.poll()
        self.running: dict[int, tuple[int, int, socket.socket]] = {}
        """The number of a process, its file and its client's connection, by both that may have news."""
        for file in (listener, sys.stdin):
            self.poll.register(file, select.POLLIN)

    def request(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for requests; returns each in a process of its own, and ends where nobody can ask any more."""
        while True:
            number, _ = self.poll.poll()[
                0
            ]  # one by one, as what is closed may be opened again under its number
            if number == sys.stdin.fileno():
                shutil.rmtree(Path(self.listener.getsockname()).parent)
                os._exit(0)
            if number in self.running:
                self.finish(number)
                continue
            connection, _ = self.listener.accept()
            try:
                request, files = receive(connection)
            except OSError:
                connection.close()
                continue
            child = os.fork()
            if child == 0:
                self.listener.close()
                connection.close()
                self.leave()
                return request, files
            self.attend(child, connection, files)

    def leave(self) -> None:
        """Close, in a forked process, what is for the others."""
        for _, ended, connection in {*self.running.values()}:
            os.close(ended)
            connection.close()

    def attend(self, child: int, connection: socket.socket, files: list[int]) -> None:
        """Tell a client the number of its process, and mind both."""
        for file in files:
            os.close(file)
        ended = os.pidfd_open(child)
        with suppress(OSError):
            connection.sendall(child.to_bytes(8, "little"))
        for number in (ended, connection.fileno()):
            self.running[number] = (child, ended, connection)
            self.poll.register(number, select.POLLIN)

    def finish(self, news: int) -> None:
        """End the process whose client is gone, or tell the client that its process has ended."""
        child, ended, connection = self.running[news]
        for number in (ended, connection.fileno()):
            self.poll.unregister(number)
            del self.running[number]
        if news != ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with suppress(OSError):
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os.close(ended)
        connection.close()


def take_files(numbers: list[int], files: list[int]) -> None:
    """Give the open files the numbers that they have for the client."""
    spare = [os.dup2(file, 1000 + index, inheritable=False) for index, file in enumerate(files)]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, spare, strict=True):
        os.dup2(file, number)
        os.close(file)


def open_streams() -> None:
    """Open the standard streams as an interpreter does, for the files that they are now, and log to the new ones."""
    encoding, _, handler = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for number, (name, mode, errors) in enumerate(STREAMS):
        old = getattr(sys, name)
        settings = {
            "encoding": encoding or old.encoding,
            "errors": handler or errors,
            "closefd": False,
        }
        buffering = 1 if number == 2 or os.isatty(number) else -1
        setattr(sys, name, open(number, mode, buffering, **settings))  # noqa: SIM115  # for good
        setattr(sys, f"__{name}__", getattr(sys, name))
        KEPT.append(old)
    for logs in [known() for known in logging._handlerList]:
        if isinstance(logs, logging.StreamHandler) and logs.stream is KEPT[2]:
            logs.setStream(sys.stderr)


def become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Take over the client's open files, folder, environment and search path; returns its arguments."""
    os.setsid()
    take_files(request["files"], files)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    open_streams()
    sys.executable = request["executable"]
    multiprocessing.set_executable(sys.executable)  # as it is read when its module is imported
    arguments: list[str] = request["arguments"]
    isolated, unbuffered = (arguments[0] == option for option in ("-I", "-u"))
    arguments = arguments[isolated or unbuffered :]
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)
    first = {"-c": "", "-m": request["folder"]}.get(arguments[0], str(Path(arguments[0]).parent))
    own = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*([] if isolated else own), *sys.path[1:]]
    return arguments


def keep_definitions() -> None:
    """Exempt torch's definitions of ops from being undone at exit, which takes 90 ms and helps no process."""
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        info.atexit = False


def run(arguments: list[str]) -> None:
    """Run what an interpreter with these arguments runs."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102  # what -c is for
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def end(code: object) -> None:
    """End as an interpreter ends with ``sys.exit(code)``, but leave its memory to the system, which takes no time."""
    if not isinstance(code, (int, type(None))):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the second where somebody has closed it
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    for name in IF_INSTALLED:
        with suppress(ImportError):
            importlib.import_module(name)
    keep_definitions()
    opgraft.reset()  # which forgets the distributions that were there, as each process has its own
    # What is unchanged since takes a third of the time.
    DEFINITIONS.read()
    for form in proof_records.recorded():
        proof_records.state_of(form)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        asked = Server(listener).request()
    try:
        run(become(*asked))
    except SystemExit as ended:
        end(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)
