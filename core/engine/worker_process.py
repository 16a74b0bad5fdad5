"""The process of a worker: it makes the calls that ``ProcessExecutor`` asks for, until nobody is there to ask."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opgraft.config import OpgraftConfig, set_config
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.engine.worker import Worker
from opgraft.errors import EngineError
from opgraft.logger import logger, write_json
from opgraft.machine.channel import Channel
from opgraft.plugins.host import load_plugins
from opgraft.registry.op_classes import qualified
from opgraft.state import host_state
from opgraft.text import described


class SharedGrammars:
    """Grammars that steps name, compiled beside the steps."""

    def __init__(self) -> None:
        self._tokens: GrammarTokens | None = None
        self._known: dict[int, Grammar] = {}

    def named(self, name: int) -> Grammar:
        """Return a grammar by its name."""
        return self._known[name]

    def take(self, name: int, spec: Any, tokens: Sequence[Any] | None, forgotten: Sequence[int]) -> None:
        """Compile a grammar and forget others.

        Args:
            name: of the grammar.
            spec: what it is compiled from.
            tokens: arguments of the ``GrammarTokens`` of this grammar and those that follow; None for those of before.
            forgotten: names that no step has any more.

        Raises:
            InputError: it cannot be compiled.
        """
        for other in forgotten:
            self._known.pop(other, None)
        if tokens is not None:
            self._tokens = GrammarTokens(*tokens)
        self._known[name] = Grammar(spec, self._tokens)  # type: ignore[arg-type]  # tokens come with the first


def main(calls_file: int, beside_file: int) -> None:
    """Make a worker and its calls, until the other end of both sockets is closed.

    Signals are for the process that asks, which finishes its requests first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    grammars = SharedGrammars()
    beside = Channel(socket.socket(fileno=beside_file))
    threading.Thread(target=_take_grammars, args=(beside, grammars), daemon=True).start()
    calls = Channel(socket.socket(fileno=calls_file), named=grammars.named)
    opgraft_config, writes_json, replacements = calls.receive()
    if writes_json:
        write_json()
    with set_config(opgraft_config, origin="the process of the engine"):
        _make_calls(calls, opgraft_config, replacements)


def _make_calls(calls: Channel, opgraft_config: OpgraftConfig, replacements: Sequence[str]) -> None:
    worker: Worker | None = None

    def call(method: str, arguments: Sequence[Any]) -> Any:
        nonlocal worker
        if worker is None:
            load_plugins()
            _expect_active(replacements)
            worker = Worker(opgraft_config)
        return getattr(worker, method)(*arguments)

    _answer(calls, call)


def _expect_active(replacements: Sequence[str]) -> None:
    known = {qualified(each.cls) for each in host_state().active}
    missing = [name for name in replacements if name not in known]
    if missing:
        raise EngineError(
            f"the process of the worker has no {', '.join(missing)}, which the engine's process registered outside of "
            "plugins: let a plugin register it, by an entry point of the group opgraft.plugins, or set "
            "parallel.worker_process to false"
        )


def _take_grammars(beside: Channel, grammars: SharedGrammars) -> None:
    """Take grammars in until the other process has ended, and end this one then, even in a step that hangs.

    It ends too if this thread fails, as the other process would wait for ever.
    """
    try:
        _answer(beside, grammars.take)
    except BaseException as error:
        logger.critical("the thread that compiles grammars has ended: %s", described(error))
        os._exit(EngineError.exit_code)
    os._exit(0)


def _answer(channel: Channel, function: Callable[..., Any]) -> None:
    """Call a function with each message that comes, and send its outcome, until the other end is closed."""
    while True:
        try:
            pickled = channel.receive_pickled()
        except (EOFError, OSError):
            return
        outcome = _outcome(channel, pickled, function)
        try:
            channel.send(outcome)
        except OSError:
            return
        except Exception as error:  # the result cannot be pickled, and nothing of it was sent
            channel.send((False, portable(error)))


def _outcome(channel: Channel, pickled: bytes, function: Callable[..., Any]) -> tuple[bool, Any]:
    """Return whether a call has succeeded, with its result or what it, or reading its arguments, raised."""
    try:
        return True, function(*channel.unpickled(pickled))
    except Exception as error:
        return False, portable(error)


def portable(error: Exception) -> Exception:
    """Return an error as another process can have it: one that cannot be pickled, as an ``EngineError`` that names it.

    Its traceback and cause stay behind.
    """
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # whatever its class raises
        copy = None
    same = type(copy) is type(error) and str(copy) == str(error)
    return error if same else EngineError(f"the worker raised {described(error)}")
