"""``ProcessExecutor``: a worker in a process of its own, so that steps and other threads do not wait for each other."""

from __future__ import annotations

import io
import json
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from opgraft.binding.pluggable_class import choose_class
from opgraft.config import OpgraftConfig
from opgraft.distributed.groups import parallelism
from opgraft.engine.executor import Executor
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.errors import DistributedError, EngineError, RequestError
from opgraft.logger import writes_json
from opgraft.machine.channel import Channel
from opgraft.registry.op_classes import qualified
from opgraft.state import host_state
from opgraft.text import described

_END_SECONDS = 5
"""Seconds that the process has to end once its channels are closed."""

_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from opgraft.engine.worker_process import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


def executor_of(opgraft_config: OpgraftConfig) -> Executor:
    """Return the executor that ``parallel.worker_process`` asks for; a plugin's own stands in the place of both.

    Raises:
        DistributedError: it asks for a process of its own, which would not be in the groups of this one.
    """
    if not opgraft_config.parallel.worker_process or choose_class(Executor).cls is not Executor:
        return Executor(opgraft_config)
    ranks = parallelism().layout.world
    if ranks > 1:
        raise DistributedError(
            f"parallel.worker_process is true, and this process is one of {ranks} ranks, to whose groups the process "
            "of the worker would not belong: set it to false"
        )
    return ProcessExecutor(opgraft_config)


class ProcessExecutor(Executor):
    """One worker in a process of its own, which has the settings of this one and the same plugins.

    It refuses to start where this one has replacements besides, such as a script registers.

    It is asked by one thread. Grammars cross by a second channel, from any thread: the worker compiles them beside its
    steps, which name them.

    Args:
        opgraft_config: resolved.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = ""
        self._sharing = threading.Lock()
        self._shared: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._forgotten: deque[int] = deque()
        self._has_tokens = False

    def start(self) -> None:
        """Start the process, its worker, and the device of that.

        Raises:
            EngineError: the process would compute without a replacement that is active here.
        """
        calls, calls_there = socket.socketpair()
        beside, beside_there = socket.socketpair()
        files = calls_there.fileno(), beside_there.fileno()
        path = json.dumps([str(entry) for entry in sys.path])
        # Isolated: neither variables nor the working folder decide what is imported before the path is set.
        command = [sys.executable, "-I", "-c", _MAIN, path, *map(str, files)]
        with calls_there, beside_there:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command, pass_fds=files, stdin=subprocess.DEVNULL, stdout=2
            )
        self._calls, self._beside = Channel(calls), Channel(beside)
        # Nothing that it holds may hold this executor, which would then live as long as the interpreter.
        self._end = weakref.finalize(self, _end, self._process, self._calls, self._beside)
        self._calls.send((self.opgraft_config, writes_json(), [qualified(each.cls) for each in host_state().active]))
        self.call("init_device")

    def call(self, method: str, *args: Any) -> Any:
        """Return what a method of the worker returns, or raise what it raises.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or when its process has ended.
        """
        if self._process is None:
            return super().call(method, *args)
        return self._asked(self._calls, (method, args), self._name_of)

    def expect_servable(self, request: Request) -> None:
        """Refuse a request with logits processors, which are functions of this process, or what else cannot leave it.

        Raises:
            RequestError: it has some.
        """
        if request.params.logits_processors:
            raise RequestError(
                f"request {request.request_id!r} has logits processors, and the model runs in a process of its own: "
                "leave them out, or set parallel.worker_process to false",
                "logits_processors",
            )
        try:
            _Elsewhere(io.BytesIO(pickle.dumps((request.request_id, request.params, request.bad_words)))).load()
        except Exception as error:  # whatever its classes raise
            raise RequestError(
                f"request {request.request_id!r} cannot be sent to the process of the model ({described(error)}): use "
                "plain texts and numbers, or set parallel.worker_process to false"
            ) from error

    def share(self, grammar: Grammar) -> None:
        """Have the worker compile a grammar, unless it has; from any thread.

        Raises:
            InputError: it cannot be compiled there.
            EngineError: the process has ended.
        """
        if grammar in self._shared:  # asked without the lock, as a step must not wait for a grammar of others
            return
        with self._sharing:
            if grammar in self._shared or self._process is None:
                return
            forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            tokens = None if self._has_tokens else grammar.tokens.made_of
            self._asked(self._beside, (id(grammar), grammar.spec, tokens, forgotten))
            self._has_tokens = True
            self._shared.add(grammar)
            weakref.finalize(grammar, self._forgotten.append, id(grammar)).atexit = False

    def _name_of(self, found: Any) -> int | None:
        """Return the name of a grammar, which the worker knows from then on; of all else there is none."""
        if not isinstance(found, Grammar):
            return None
        self.share(found)
        return id(found)

    def _asked(self, channel: Channel, message: Any, name_of: Callable[[Any], Any] = lambda found: None) -> Any:
        if self._ended:
            raise self._lost()
        try:
            channel.send(message, name_of)
            done, answer = channel.receive()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        except Exception:  # of pickling, before anything was sent, or of unpickling all that was
            raise
        except BaseException:  # an interrupt, after which nobody knows how much of a message has come
            self._finish("an interrupt came while the process of the worker was asked, which was ended")
            raise
        if not done:
            raise answer
        return answer

    def check_health(self) -> None:
        """Raise where the process has ended; from any thread.

        Raises:
            EngineError: it has.
        """
        if self._ended or (self._process is not None and self._process.poll() is not None):
            raise self._lost()

    def _lost(self) -> EngineError:
        """Return the error that says why there is no worker any more, which is the first reason that there was."""
        if not self._ended and self._process is not None:
            status: int | str = "unknown"
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_END_SECONDS)
            self._finish(f"the process of the worker has ended, with the status {status}: stderr may say why")
        return EngineError(f"{self._ended}; make a new engine")

    def kill(self) -> None:
        """End the process at once, whatever it does; from any thread."""
        if self._process is not None:
            self._process.kill()

    def shutdown(self) -> None:
        """End the process, and with it its worker. Further calls do nothing."""
        if self._process is not None:
            self._finish("the engine was shut down")

    def _finish(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._end()


class _Elsewhere(pickle.Unpickler):
    """Unpickles as another process does, which has another ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise pickle.UnpicklingError(f"{name} is a class of the script, which that process does not have")
        return super().find_class(module, name)


def _end(process: subprocess.Popen[bytes], *channels: Channel) -> None:
    for channel in channels:
        channel.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
