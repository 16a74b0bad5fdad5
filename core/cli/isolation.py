"""Run part of a command in a child process, so that a plugin cannot take the command down."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opgraft.cli.ending import PATIENCE, awaited
from opgraft.cli.output import COMMAND_LINE
from opgraft.config import CURRENT_SCOPE, config_from_fields, parse_text, read_file, set_config
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import ChildError
from opgraft.machine.child import ChildRemains, run_child
from opgraft.machine.host_memory import memory_limit
from opgraft.plugins.discovery import Offer, discover
from opgraft.plugins.quarantine import against, confine
from opgraft.plugins.requirements import asked_for
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state
from opgraft.registry.watching import LISTENERS, told_when_late

TIME_LIMIT = 60.0
"""Seconds. A plugin that compiles kernels at the first import needs more."""

MEMORY_SHARE = 2
"""The memory of the host, divided by the limit of the child."""

_LINGER = 10.0
"""Seconds after the load of a plugin in which threads of the plugin may still do harm."""

_BEFORE_THE_END = 0.9
"""The part of the time limit after which Python writes the stack of running code."""

_DUMP = re.compile(r"^(Fatal Python error: .*|Timeout \(\d+:\d+:\d+.*\)!)$", re.MULTILINE)
_RAISED_AT_EXIT = re.compile(r"^Exception ignored (in|while calling) atexit callback", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^<"][^"]*)", line (\d+),? in', re.MULTILINE)

_CHILD = "from opgraft.cli.isolation import answer; answer(reply_to, **data)"


@dataclass(frozen=True)
class Limits:
    """The limits of a child: ``seconds`` without a word, and ``memory`` in bytes."""

    seconds: float = TIME_LIMIT
    memory: int = field(default_factory=lambda: memory_limit() // MEMORY_SHARE)


@dataclass(frozen=True)
class ProcessOutcome:
    """The result of a function in a child process, or the finding about the end of the child.

    Attributes:
        result: of the function.
        crash: the finding about the end of the child, instead of a result.
        left_out: findings about plugins that were left out.
        begun: the providers of code that had begun, in this order.
        end: the end of the child in words.
        guilty: the end is a reason for quarantine.
        late: the child did not come back, and was stopped.
        seconds: the life time of the child.
        at_exit: the finding about code that ran after the result.
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

    A crash may come from a thread of another plugin. So a plugin goes into quarantine only if it
    takes a child down alone, too.
    """
    limits = limits or Limits()
    left_out: list[Finding] = []
    while True:
        without = [finding.provider.name for finding in left_out if finding.provider]
        given = going_without(without)
        outcome = isolated(module, function, *arguments, limits=limits, given=given)
        crash = outcome.crash
        if crash is None or crash.provider is None or crash.provider.name in without:
            at_exit = outcome.at_exit
            if at_exit is not None:
                at_exit = _advised(_attributed(at_exit, outcome, limits))
            if crash is not None:
                crash = _advised(crash)
            return replace(outcome, crash=crash, left_out=tuple(left_out), at_exit=at_exit)
        found = _tried(outcome, crash, limits)
        # A plugin in quarantine is left out of the next child anyway.
        if found.provider is None or against(found.provider) is None:
            left_out.append(found)


def _tried(outcome: ProcessOutcome, crash: Finding, limits: Limits) -> Finding:
    """Return the finding about the plugin that ended a child. Put a guilty one in quarantine."""
    if not outcome.guilty:
        return _advised(crash)
    # The code that does not come back is known. No trial has to find the plugin.
    if outcome.late:
        return _confined(crash)
    linger = str(min(_LINGER, outcome.seconds))
    # The plugin with the running code first, then earlier ones, the latest first.
    suspects = dict.fromkeys((crash.provider, *reversed(outcome.begun)))
    for provider in suspects:
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
    alone_it_works = "neither it nor one before it does so when it is loaded alone"
    message = f"{crash.message}; it is not in quarantine, as {alone_it_works}"
    return _advised(replace(crash, message=message))


def _attributed(at_exit: Finding, outcome: ProcessOutcome, limits: Limits) -> Finding:
    """Return a finding about the end of a child with the guilty plugin, if the guilt is certain.

    A destructor in C leaves no line of Python. A plugin is guilty if a child with the plugin alone
    ends badly, and a child without plugins ends well.
    """
    if at_exit.provider is not None or _ending_without(limits, "") is not None:
        return at_exit
    for provider in outcome.begun:
        alone = _ending_without(limits, provider.name)
        if alone is not None:
            return replace(at_exit, provider=provider, location=alone.location)
    return at_exit


def _ending_without(limits: Limits, plugin: str) -> Finding | None:
    """Return the finding about the end of a child with this plugin alone, or without plugins."""
    given = {"plugins": plugin}
    return isolated(__name__, "load_alone", "0", limits=limits, given=given).at_exit


def _confined(crash: Finding) -> Finding:
    outcome = confine(crash.provider, str(crash)) if crash.provider else ""
    return _advised(replace(crash, message=f"{crash.message}; {outcome}"))


def _advised(crash: Finding) -> Finding:
    name = crash.provider.name if crash.provider else "<name>"
    advice = f"{PLUGINS_DISABLE}={name} goes without a plugin."
    return replace(crash, message=f"{crash.message}. {advice}")


def going_without(names: Sequence[str]) -> dict[str, str]:
    """Return the settings for a child that leave plugins out.

    The names go off the allow list and out of ``providers``, too, as these ask for the plugins.

    Args:
        names: of entry points or distributions, as in ``plugins_disable``.
    """
    if not names:
        return {}
    settings = host_state().settings()
    config = settings.config
    given = {"plugins_disable": ",".join([*(config.plugins_disable or ()), *names])}
    left_out = [offer for offer in discover().offers if asked_for(offer, names)]
    # Each plugin on the allow list must become active.
    if config.plugins is not None:
        allowed = set()
        for offer in discover().offers:
            if offer in left_out:
                continue
            if asked_for(offer, config.plugins):
                allowed.add(offer.name)
        given["plugins"] = ",".join(sorted(allowed))
    providers = {}
    is_named = False
    for op in config.providers or ():
        wanted = settings.wanted_providers(op)
        kept = [name for name in wanted if not _answers(left_out, name)]
        is_named = is_named or len(kept) < len(wanted)
        if kept:
            providers[op] = kept
    if is_named:
        given["providers"] = json.dumps(providers)
    return given


def _answers(offers: Iterable[Offer], name: str) -> bool:
    """Return True if a setting names one of the offers."""
    return any(offer.answers_to(name) for offer in offers)


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
    advice: str | None = None,
) -> ProcessOutcome:
    """Call a function in a child process, under the settings of this process.

    Args:
        module: of the function.
        function: returns plain data.
        *arguments: of the function.
        limits: of the child.
        heard: called with the data that the function hands to ``tell``.
        given: settings above all others.
        advice: a sentence for people who wait for slow code; by default how to go without it.
    """
    limits = limits or Limits()
    above = {}
    # The child reads the environment and files itself, and does not know the command line.
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
    began = time.monotonic()
    lines = _Lines(heard, limits.seconds, advice)
    try:
        with lines:
            ended = run_child(_CHILD, (), data, limits.seconds, os.environ, limits.memory, lines)
    except ChildError as error:
        message = f"the plugins cannot be tried in a process of their own: {error}"
        crash = Finding(message, exit_code=4)
        return ProcessOutcome(crash=crash)
    return _outcome(ended, limits, tuple(lines.begun), time.monotonic() - began)


def _outcome(
    ended: ChildRemains, limits: Limits, begun: tuple[Provider, ...], seconds: float
) -> ProcessOutcome:
    """Return the result of a child, or the finding about its end."""
    last = _last_line(ended.reply)
    end = _end_in_words(ended, limits)
    late = ended.status is None and not ended.memory
    outcome = ProcessOutcome(begun=begun, end=end, late=late, seconds=seconds)
    if "result" in last:
        return replace(outcome, result=last["result"], at_exit=_at_exit(ended, end))

    provider = Provider(**last["provider"]) if last.get("provider") else None
    place = _place(ended.output, provider) if provider else None
    what = last.get("what", "loading the plugins")
    crash = Finding(f"{what} {end}", provider, place, exit_code=4)
    return replace(outcome, crash=crash, guilty=ended.died)


def _at_exit(ended: ChildRemains, end: str) -> Finding | None:
    """Return a finding if a child ended badly after the answer. Each command would do the same."""
    problem, exit_code = _problem_at_exit(ended, end)
    if not problem:
        return None
    message = f"code that runs when the process ends {problem}"
    for offer in discover().offers:
        place = None if offer.built_in else _place(ended.output, offer.provider)
        if place is not None:
            return Finding(message, offer.provider, place, exit_code=exit_code)
    return Finding(message, exit_code=exit_code)


def _problem_at_exit(ended: ChildRemains, end: str) -> tuple[str, int]:
    """Return the problem after the answer, or an empty text, and the exit code."""
    dumps = _DUMP.findall(ended.output)
    # The dump with exit=True ends the process with the status 1.
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
    """The lines of a reply: they name the running code, and carry data for ``heard``.

    While the object is entered, slow code is reported on stderr.
    """

    def __init__(
        self, heard: Callable[[Any], None] | None, time_limit: float, advice: str | None
    ) -> None:
        self.advice = advice
        self.heard = heard
        self.time_limit = time_limit
        # A dictionary, as a set with an order.
        self.begun: dict[Provider, None] = {}
        self.rest = b""
        self.running = ExitStack()

    def __enter__(self) -> None:
        """Begin to listen."""

    def __exit__(self, *error: object) -> None:
        self.running.close()

    def __call__(self, piece: bytes) -> None:
        # A piece may end within a line.
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            said = _last_line(line.decode(errors="replace"))
            provider = Provider(**said["provider"]) if said.get("provider") else None
            if provider is not None:
                self.begun[provider] = None
            self.running.close()
            if "what" in said:
                late = told_when_late(said["what"], provider, self.time_limit, self.advice)
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
    # Nothing was written, or a plugin has written to the pipe.
    except (IndexError, ValueError, TypeError, RecursionError):
        return {}


def _end_in_words(ended: ChildRemains, limits: Limits) -> str:
    if ended.memory:
        taken = f"{ended.memory / 2**30:.1f} GiB of memory"
        most = f"{limits.memory / 2**30:.1f} GiB that it may have"
        end = f"took {taken}, more than the {most}, and was stopped"
    elif ended.status is None:
        longer = f"'opgraft plugins doctor --time-limit {10 * limits.seconds:g}' waits longer"
        end = f"did not come back within {limits.seconds:g} s ({longer})"
    elif ended.status < 0:
        end = f"crashed the process with signal {_signal_name(-ended.status)}"
    else:
        end = f"ended the process with status {ended.status}"
    before_dump = _DUMP.split(ended.output)[0].strip().splitlines()
    return f"{end}: {before_dump[-1]}" if before_dump else end


def _place(output: str, provider: Provider) -> str | None:
    """Return ``file:line`` of code of ``provider`` on the stack in the child's output."""
    tops = set()
    for offer in discover().offers:
        if offer.provider == provider:
            tops.add(offer.module.partition(".")[0])
    last_dump = _DUMP.split(output)[-1]
    dump = _RAISED_AT_EXIT.split(last_dump)[-1]
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
    """Call the function in the child. Write the running code, then the result, as lines of JSON.

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
    # A thread or a process may go on for ever.
    if awaited():
        os._exit(0)
    # Functions of plugins that run at exit run now, and the parent sees the end.
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def _write(reply_to: int, data: Mapping[str, Any]) -> None:
    with open(reply_to, "w", encoding="utf-8", closefd=False) as pipe:
        pipe.write(f"{json.dumps(data)}\n")


class _Reporter:
    """Writes the provider of the running code at each change, and data for the parent."""

    def __init__(self, reply_to: int, seconds: float) -> None:
        self.reply_to = reply_to
        self.seconds = seconds
        self.running: list[dict[str, Any]] = [{}]

    def begins(self, what: str, provider: Provider | None) -> None:
        owner = provider.to_dict() if provider else None
        self.running.append({"what": what, "provider": owner})
        self._tell_who()

    def ends(self) -> None:
        self.running.pop()
        self._tell_who()

    def tell(self, data: Any) -> None:
        _write(self.reply_to, {"told": data})
        self._tell_who()

    def _tell_who(self) -> None:
        # Each step of a plugin has the whole time, so the timer starts anew.
        faulthandler.dump_traceback_later(self.seconds)
        _write(self.reply_to, self.running[-1])


def _signal_name(number: int) -> str:
    """Return the name of a signal, or the number of a real-time signal."""
    if number not in set(signal.Signals):
        return str(number)
    return signal.Signals(number).name
