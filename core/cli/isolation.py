"""Running part of a command in a child process, where a plugin that ends its process takes nothing else down."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opgraft.cli.ending import PATIENCE, awaited_threads
from opgraft.cli.output import COMMAND_LINE
from opgraft.config import CURRENT_SCOPE, config_from_fields, parse_text, read_file, set_config
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import ChildError
from opgraft.machine.child import Ended, run_child
from opgraft.machine.host_memory import memory_limit
from opgraft.plugins.discovery import discover
from opgraft.plugins.quarantine import against, confine
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state
from opgraft.registry.watching import LISTENERS, told_when_late

TIME_LIMIT = (
    60.0  # seconds; a plugin that compiles its kernels when it is first imported needs more
)
MEMORY_SHARE = 2  # the memory that there is by the most that the child may have
_LINGER = 10.0  # seconds: who does harm some time after it was loaded does so by then, or is not found out

_BEFORE_THE_END = 0.9  # of the time limit: who is still at it by then is asked where
_DUMP = re.compile(r"^(Fatal Python error: .*|Timeout \(\d+:\d+:\d+.*\)!)$", re.MULTILINE)
_RAISED_AT_EXIT = re.compile(r"^Exception ignored (in|while calling) atexit callback", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^<"][^"]*)", line (\d+),? in', re.MULTILINE)

_CHILD = "from opgraft.cli.isolation import answer; answer(reply_to, **data)"


@dataclass(frozen=True)
class Limits:
    """The most that a child may take: ``seconds`` without a word, and ``memory`` in bytes."""

    seconds: float = TIME_LIMIT
    memory: int = field(default_factory=lambda: memory_limit() // MEMORY_SHARE)


@dataclass(frozen=True)
class ProcessOutcome:
    """The result of a function in a child process, or the finding about the end of the child.

    Attributes:
        left_out: the findings about plugins that the result does without.
        begun: whose code had begun, in that order.
        end: how the child ended, in words.
        guilty: whether that is a reason for quarantine.
        late: whether it had to be ended, as it did not come back.
        seconds: that it lived.
        at_exit: the finding about code that ran after the result, while the child ended.
    """

    result: Any = None
    crash: Finding | None = None
    left_out: tuple[Finding, ...] = ()
    begun: tuple[Provider, ...] = ()
    end: str = ""
    guilty: bool = False
    late: bool = False
    seconds: float = 0.0
    at_exit: Finding | None = None


def examined(
    module: str, function: str, *arguments: str, limits: Limits | None = None
) -> ProcessOutcome:
    """Call a function as ``isolated`` does, without the plugins that end the child.

    A plugin that takes a child down alone as well is to blame, and is put into quarantine: the crash of
    one plugin may come from a thread of another one.
    """
    limits, left_out = limits or Limits(), list[Finding]()
    while True:
        without = [finding.provider.name for finding in left_out if finding.provider]
        outcome = isolated(
            module, function, *arguments, limits=limits, given=_going_without(without)
        )
        crash = outcome.crash
        if crash is None or crash.provider is None or crash.provider.name in without:
            at_exit = outcome.at_exit
            if at_exit is not None:
                at_exit = _attributed(at_exit, outcome, limits)
                at_exit = _advised(at_exit)
            if crash is not None:
                crash = _advised(crash)
            return replace(outcome, crash=crash, left_out=tuple(left_out), at_exit=at_exit)
        found = _tried(outcome, crash, limits)
        if found.provider is None or against(found.provider) is None:
            left_out.append(found)


def _tried(outcome: ProcessOutcome, crash: Finding, limits: Limits) -> Finding:
    """Return the finding about the plugin that ended a child; in quarantine if that is certain."""
    if not outcome.guilty:
        return _advised(crash)
    if outcome.late:
        return _confined(crash)
    linger = str(min(_LINGER, outcome.seconds))
    for provider in dict.fromkeys((crash.provider, *reversed(outcome.begun))):
        name = provider.name if provider else ""
        given = {"plugins": name}
        alone = isolated(__name__, "load_alone", linger, limits=limits, given=given)
        if not alone.guilty:
            continue
        if alone.crash and alone.crash.provider == provider:
            return _confined(alone.crash)
        message = f"{provider}, some time after it was loaded alone, {alone.end}"
        later = Finding(message, provider, exit_code=4)
        return _confined(later)
    words = f"{crash.message}; it is not in quarantine, as neither it nor one before it does so when it is loaded alone"
    return _advised(replace(crash, message=words))


def _attributed(at_exit: Finding, outcome: ProcessOutcome, limits: Limits) -> Finding:
    """Return a finding about the end of a child with the plugin that is to blame, as far as that is certain.

    A destructor in C leaves no line of Python. The plugin is to blame if the end goes wrong after the
    plugin alone was loaded, and well after no plugin was.
    """
    if at_exit.provider is not None or _ending_without(limits, "") is not None:
        return at_exit
    for provider in outcome.begun:
        alone = _ending_without(limits, provider.name)
        if alone is not None:
            return replace(at_exit, provider=provider, location=alone.location)
    return at_exit


def _ending_without(limits: Limits, plugin: str) -> Finding | None:
    """Return the finding about the end of a child that loads no other plugin than this one."""
    given = {"plugins": plugin}
    return isolated(__name__, "load_alone", "0", limits=limits, given=given).at_exit


def _confined(crash: Finding) -> Finding:
    outcome = confine(crash.provider, str(crash)) if crash.provider else ""
    return _advised(replace(crash, message=f"{crash.message}; {outcome}"))


def _advised(crash: Finding) -> Finding:
    name = crash.provider.name if crash.provider else "<name>"
    return replace(
        crash, message=f"{crash.message}. {PLUGINS_DISABLE}={name} goes without a plugin."
    )


def _going_without(names: Sequence[str]) -> dict[str, str]:
    if not names:
        return {}
    config = host_state().settings().config
    denied = config.plugins_disable or ()
    return {"plugins_disable": ",".join([*denied, *names])}


def load_alone(linger: str) -> None:
    """Load the plugins that the settings admit, and wait for their threads to do harm."""
    importlib.import_module("opgraft.cli.loading").load_all()
    time.sleep(float(linger))


def isolated(
    module: str,
    function: str,
    *arguments: str,
    limits: Limits | None = None,
    heard: Callable[[Any], None] | None = None,
    given: Mapping[str, str] | None = None,
) -> ProcessOutcome:
    """Call a function that returns plain data in a child process, under this process's settings.

    ``heard`` is called with what the function hands to ``tell`` meanwhile. ``given`` settings stand above the others.
    """
    limits = limits or Limits()
    above = {}
    for name, text, origin in host_state().settings().rows():
        if origin == COMMAND_LINE:
            above[name] = text
    above |= given or {}
    scope = CURRENT_SCOPE.get()
    file = scope.file.path if scope and scope.file else None
    call = {
        "module": module,
        "function": function,
        "arguments": arguments,
        "seconds": limits.seconds,
    }
    data = {**call, "given": above, "file": file}
    began, lines = time.monotonic(), _Lines(heard, limits.seconds)
    try:
        with lines:
            ended = run_child(_CHILD, (), data, limits.seconds, os.environ, limits.memory, lines)
    except ChildError as error:
        message = f"the plugins cannot be tried in a process of their own: {error}"
        crash = Finding(message, exit_code=4)
        return ProcessOutcome(crash=crash)
    return _outcome(ended, limits, tuple(lines.begun), time.monotonic() - began)


def _outcome(
    ended: Ended, limits: Limits, begun: tuple[Provider, ...], seconds: float
) -> ProcessOutcome:
    """Return the result of a child, or the finding about its end."""
    last, end = _last_line(ended.reply), _end_in_words(ended, limits)
    late = ended.status is None and not ended.memory
    if "result" in last:
        at_exit = _at_exit(ended, end)
        return ProcessOutcome(
            last["result"], begun=begun, end=end, late=late, seconds=seconds, at_exit=at_exit
        )

    provider = Provider(**last["provider"]) if last.get("provider") else None
    place = _place(ended.output, provider) if provider else None
    what = last.get("what", "loading the plugins")
    crash = Finding(f"{what} {end}", provider, place, exit_code=4)
    return ProcessOutcome(
        crash=crash, begun=begun, end=end, guilty=ended.died, late=late, seconds=seconds
    )


def _at_exit(ended: Ended, end: str) -> Finding | None:
    """Return a finding about a child that ended badly after its answer, as each command with its plugins does."""
    problem, exit_code = _problem_at_exit(ended, end)
    if not problem:
        return None
    provider, place = None, None
    for offer in discover().offers:
        place = None if offer.built_in else _place(ended.output, offer.provider)
        if place is not None:
            provider = offer.provider
            break
    message = f"code that runs when the process ends {problem}"
    return Finding(message, provider, place, exit_code=exit_code)


def _problem_at_exit(ended: Ended, end: str) -> tuple[str, int]:
    """Return what went wrong after the answer, empty if nothing did, and the exit code for the finding."""
    dumps = _DUMP.findall(ended.output)
    if ended.status == 1 and dumps and dumps[-1].startswith("Timeout"):
        late = f"had not ended after {PATIENCE:g} s"
        return f"{late}: each command that loads the plugins ends without it then", 1
    if ended.status != 0:
        fails = "each command that loads the plugins gives its answer, and then fails"
        return f"{end}: {fails}", 4
    if _RAISED_AT_EXIT.search(ended.output):
        *_, last = ended.output.strip().splitlines()
        return f"raised {last}: each command that loads the plugins prints this", 1
    return "", 0


class _Lines:
    """Puts pieces of a reply together, notes whose code runs, and hands on what lines tell.

    Slow code is told of while the scope of this object lasts.
    """

    def __init__(self, heard: Callable[[Any], None] | None, time_limit: float) -> None:
        self.heard = heard
        self.time_limit = time_limit
        self.begun: dict[Provider, None] = {}
        self.rest = b""
        self.running = ExitStack()

    def __enter__(self) -> None:
        """Begin to listen."""

    def __exit__(self, *error: object) -> None:
        self.running.close()

    def __call__(self, piece: bytes) -> None:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            said = _last_line(line.decode(errors="replace"))
            provider = Provider(**said["provider"]) if said.get("provider") else None
            if provider is not None:
                self.begun[provider] = None
            self.running.close()
            if "what" in said:
                late = told_when_late(said["what"], provider, self.time_limit)
                self.running.enter_context(late)
            if "told" in said and self.heard:
                self.heard(said["told"])


def tell(data: Any) -> None:
    """Hand plain data to the parent process, while the called function goes on."""
    for listener in LISTENERS:
        if isinstance(listener, _Reporter):
            listener.tell(data)


def _last_line(reply: str) -> Mapping[str, Any]:
    try:
        return dict(json.loads(reply.splitlines()[-1]))
    # Nothing was written, or plugins wrote to it too.
    except (
        IndexError,
        ValueError,
        TypeError,
        RecursionError,
    ):
        return {}


def _end_in_words(ended: Ended, limits: Limits) -> str:
    if ended.memory:
        most = f"{limits.memory / 2**30:.1f} GiB that it may have"
        end = (
            f"took {ended.memory / 2**30:.1f} GiB of memory, more than the {most}, and was stopped"
        )
    elif ended.status is None:
        longer = f"'opgraft plugins doctor --time-limit {10 * limits.seconds:g}' waits longer"
        end = f"did not come back within {limits.seconds:g} s ({longer})"
    elif ended.status < 0:
        end = f"crashed the process with signal {_signal_name(-ended.status)}"
    else:
        end = f"ended the process with status {ended.status}"
    return ": ".join([end, *_DUMP.split(ended.output)[0].strip().splitlines()[-1:]])


def _place(output: str, provider: Provider) -> str | None:
    """Return ``file:line`` of code of ``provider`` on the stack in the child's output."""
    tops = set()
    for offer in discover().offers:
        if offer.provider == provider:
            tops.add(offer.module.partition(".")[0])
    dump = _RAISED_AT_EXIT.split(_DUMP.split(output)[-1])[-1]
    _, _, stack = dump.rpartition("(most recent call first):")
    for file, line in _FRAME.findall(stack):
        path = Path(file)
        if path.stem in tops or not tops.isdisjoint(path.parts):
            return f"{file}:{line}"
    return None


def answer(
    reply_to: int,
    module: str,
    function: str,
    arguments: Sequence[str],
    given: Mapping[str, str],
    file: str | None,
    seconds: float,
) -> None:
    """Call the function on the child's side; write whose code runs, then the result, a line of JSON each.

    At a crash, or shortly before the end of ``seconds``, Python writes the stack to the output.
    """
    faulthandler.enable(all_threads=False)
    LISTENERS.append(_Reporter(reply_to, _BEFORE_THE_END * seconds))
    values = {name: parse_text(name, text) for name, text in given.items()}
    settings_file = read_file(file) if file is not None else None
    config = config_from_fields(values)
    with set_config(config, origin=COMMAND_LINE, file=settings_file):
        owner = importlib.import_module(module)
        call = getattr(owner, function)
        result = call(*arguments)
    _write(reply_to, {"result": result})
    if awaited_threads():  # which may go on for ever
        os._exit(0)
    # Functions of plugins that run at exit run now, and the parent sees the end.
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def _write(reply_to: int, data: Mapping[str, Any]) -> None:
    with open(reply_to, "w", encoding="utf-8", closefd=False) as pipe:
        pipe.write(f"{json.dumps(data)}\n")


class _Reporter:
    """Writes whose code runs whenever that changes, and what there is to tell."""

    def __init__(self, reply_to: int, seconds: float) -> None:
        self.reply_to = reply_to
        self.seconds = seconds
        self.running: list[dict[str, Any]] = [{}]

    def begins(self, what: str, provider: Provider | None) -> None:
        self.running.append({"what": what, "provider": provider.to_dict() if provider else None})
        self._tell_who()

    def ends(self) -> None:
        self.running.pop()
        self._tell_who()

    def tell(self, data: Any) -> None:
        _write(self.reply_to, {"told": data})
        self._tell_who()

    def _tell_who(self) -> None:
        faulthandler.dump_traceback_later(self.seconds)
        _write(self.reply_to, self.running[-1])


def _signal_name(number: int) -> str:
    """Return the name of a signal; those for real-time use have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
