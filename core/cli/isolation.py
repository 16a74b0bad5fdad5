"""Running part of a command in a child process, where a plugin that ends its process takes nothing else down."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.cli.output import COMMAND_LINE
from opgraft.config import CURRENT_SCOPE, config_from_fields, parse_text, read_file, set_config
from opgraft.decision import Provider
from opgraft.environment import PLUGINS_DISABLE
from opgraft.errors import ChildError
from opgraft.finding import Finding
from opgraft.machine.child import Ended, run_child
from opgraft.machine.host_memory import host_memory
from opgraft.plugins.quarantine import against, confine
from opgraft.plugins.watching import BEGINS, ENDS, logger
from opgraft.state import host_state

TIME_LIMIT = 600.0  # seconds: a plugin may compile its kernels when it is first imported

MEMORY_SHARE = 2  # the memory of the host by the most that the child may have

_TOLD = "told"
"""The message by which ``tell`` reaches what writes to the other process."""

_CHILD = "from opgraft.cli.isolation import answer; answer(reply_to, **data)"


@dataclass(frozen=True)
class Outcome:
    """The result of a function in a child process, or the finding that tells whose code ended or held up the child."""

    result: Any = None
    crash: Finding | None = None


def examined(module: str, function: str, *arguments: str) -> Outcome:
    """Call a function as ``isolated`` does; again without whom it put into quarantine, until it comes back."""
    tried: set[Provider] = set()
    while True:
        outcome = isolated(module, function, *arguments)
        culprit = outcome.crash.provider if outcome.crash else None
        if culprit is None or culprit in tried or against(culprit) is None:
            return outcome
        tried.add(culprit)


def isolated(
    module: str,
    function: str,
    *arguments: str,
    time_limit: float = TIME_LIMIT,
    heard: Callable[[Any], None] | None = None,
) -> Outcome:
    """Call a function that returns plain data in a child process, with this process's environment and settings.

    ``heard`` is called with what the function hands to ``tell`` meanwhile.
    """
    given = {name: text for name, text, origin in host_state().settings().rows() if origin == COMMAND_LINE}
    scope = CURRENT_SCOPE.get()
    file = scope.file.path if scope and scope.file else None
    data = {"module": module, "function": function, "arguments": arguments, "given": given, "file": file}
    try:
        limit = host_memory()[0] // MEMORY_SHARE
        listen = _Lines(heard) if heard else None
        ended = run_child(_CHILD, (), data, time_limit, os.environ, limit, listen)
    except ChildError as error:
        return Outcome(crash=Finding(f"the plugins cannot be tried in a process of their own: {error}", exit_code=4))
    last = _last_line(ended.reply)
    return Outcome(last["result"]) if "result" in last else Outcome(crash=_crash(last, ended, time_limit))


class _Lines:
    """Puts pieces of a reply together, and hands on what its lines tell."""

    def __init__(self, heard: Callable[[Any], None]) -> None:
        self.heard = heard
        self.rest = b""

    def __call__(self, piece: bytes) -> None:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            told = _last_line(line.decode(errors="replace"))
            if "told" in told:
                self.heard(told["told"])


def tell(data: Any) -> None:
    """Hand plain data to the process that waits for this one, while the function that it called goes on."""
    logger.debug(_TOLD, extra={"told": data})


def _last_line(reply: str) -> Mapping[str, Any]:
    try:
        return dict(json.loads(reply.splitlines()[-1]))
    except (IndexError, ValueError, TypeError, RecursionError):  # nothing was written, or plugins wrote to it too
        return {}


def _crash(running: Mapping[str, Any], ended: Ended, time_limit: float) -> Finding:
    provider = Provider(**running["provider"]) if running.get("provider") else None
    if ended.memory:
        end = f"took {ended.memory / 2**30:.1f} GiB of memory, more than half of the machine's, and was stopped"
    elif ended.status is None:
        end = f"did not come back within {time_limit:g} s"
    elif ended.status < 0:
        end = f"crashed the process with signal {_signal_name(-ended.status)}"
    else:
        end = f"ended the process with status {ended.status}"
    said = ended.output.strip().splitlines()[-1:]
    words = ": ".join([f"{running.get('what', 'loading the plugins')} {end}", *said])
    outcome = f"; {confine(provider, words)}" if provider is not None and ended.died else ""
    advice = f"{PLUGINS_DISABLE}={provider.name if provider else '<name>'} goes without a plugin."
    return Finding(f"{words}{outcome}. {advice}", provider, exit_code=4)


def answer(
    reply_to: int, module: str, function: str, arguments: Sequence[str], given: Mapping[str, str], file: str | None
) -> None:
    """Call the function on the child's side; write whose code runs, then what it returned, a line of JSON each."""
    logger.addHandler(_Reporter(reply_to))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    values = {name: parse_text(name, text) for name, text in given.items()}
    settings_file = read_file(file) if file is not None else None
    with set_config(config_from_fields(values), origin=COMMAND_LINE, file=settings_file):
        result = getattr(importlib.import_module(module), function)(*arguments)
    _write(reply_to, {"result": result})


def _write(reply_to: int, data: Mapping[str, Any]) -> None:
    with open(reply_to, "w", encoding="utf-8", closefd=False) as pipe:
        pipe.write(f"{json.dumps(data)}\n")


class _Reporter(logging.Handler):
    """Writes whose code runs whenever that changes."""

    def __init__(self, reply_to: int) -> None:
        super().__init__(logging.DEBUG)
        self.reply_to = reply_to
        self.running: list[dict[str, Any]] = [{}]

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == _TOLD:
            _write(self.reply_to, {"told": getattr(record, "told", None)})
        elif record.msg == BEGINS:
            said = vars(record)
            name, version = said.get("opgraft.provider.name"), said.get("opgraft.provider.version")
            provider = Provider(name, version).to_dict() if name else None
            self.running.append({"what": record.args[0], "provider": provider})  # type: ignore[index]
        elif record.msg == ENDS:
            self.running.pop()
        _write(self.reply_to, self.running[-1])


def _signal_name(number: int) -> str:
    """Return the name of a signal; those for real-time use have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
