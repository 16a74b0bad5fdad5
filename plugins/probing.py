"""Probes of platforms: built-in ones run in this process, others in a child process.

A probe of others may hang, crash the interpreter or raise anything. The child has a time limit, and
every outcome becomes ``Evidence``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import linecache
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opgraft.base.text import described, shortened
from opgraft.errors import (
    ChildError,
    LostChildError,
    PlatformError,
    PluginError,
    close_matches,
    raised_at,
    raised_in,
)
from opgraft.machine.evidence import Evidence
from opgraft.machine.machine import Machine, mapped, masked
from opgraft.platform import PlatformSpec
from opgraft.plugins.discovery import PLATFORM_BRIDGES, PLATFORM_GROUP, Offer
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state
from opgraft.registry.watching import own_interrupts_as_errors, told_when_late

TIME_LIMIT = 10.0  # seconds

SLOW = 5.0  # seconds
"""The time of a slow probe. Those of opgraft take milliseconds."""

_OF_EVERYBODY = re.compile(
    r"/dev/(null|zero|u?random|console|ptmx|tty\w*|hvc\d+|std\w+|(pts|shm|fd|mqueue)(/.*)?)"
)
"""Device files that processes have open without a device, such as a terminal."""

_CHILD = "from opgraft.plugins.probing import answer; answer(reply_to, data, *sys.argv[3:])"

_TORCH = "torch"

LEAST_TIME = 3.0  # seconds
"""The least time limit of a probe that begins late."""

_AT_ONCE = 32
"""The most probes that run at the same time."""

_FILES = 12  # that this process has to open for one of them, at most

_ANSWERING = threading.Event()
"""Set in a child process that runs a probe, which must not start children of its own."""


class ProbeFailed(Exception):  # noqa: N818  # an outcome for selection, which no user catches
    """A probe gave no evidence; the message says why.

    ``location`` is ``file:line`` of the fault, if a line tells.
    """

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


def ask(
    offer: Offer, machine: Machine, time_limit: float = TIME_LIMIT, *, is_late: bool = False
) -> Evidence:
    """Ask an offered platform's probe for its evidence.

    A probe without an answer goes into quarantine, unless it ``is_late``: other probes have taken a
    part of the time.

    Raises:
        ProbeFailed: the probe raised, crashed, took more than ``time_limit`` seconds or gave no
            ``Evidence``.
    """
    if offer.built_in:
        return run_probe(offer, machine)
    if _ANSWERING.is_set():
        raise PlatformError(
            f"platform {offer.name!r} was probed from within another platform's probe: a module "
            "that has a PlatformSpec must not use opgraft.current_platform() or construct ops when "
            "it is imported"
        )
    return _ask_child(offer, machine, time_limit, is_late)


def ask_all(offers: Sequence[Offer], machine: Machine) -> list[Evidence | Exception]:
    """Ask the probes of several platforms, those of others at the same time.

    All share one time limit, since few run at the same time if this process may open few files. A
    probe that begins late has ``LEAST_TIME`` at least.

    Returns:
        For each offer, in order, the evidence or the error that ``ask`` raised.
    """
    answers: dict[Offer, Evidence | Exception] = {}
    deadline = time.monotonic() + TIME_LIMIT

    def ask_some(waiting: list[Offer]) -> None:
        while True:
            try:
                offer = waiting.pop(0)
            except IndexError:  # the list is empty, or another thread took the last offer
                return
            try:
                # Whole seconds, as messages quote the limit.
                left = math.ceil(deadline - time.monotonic())
                time_limit = min(TIME_LIMIT, max(LEAST_TIME, left))
                is_late = time_limit < TIME_LIMIT
                answers[offer] = ask(offer, machine, time_limit, is_late=is_late)
            except Exception as error:
                answers[offer] = error

    waiting = [offer for offer in offers if not offer.built_in]
    own = [offer for offer in offers if offer.built_in]
    helpers = 0
    if waiting:
        helpers = min(len(waiting), _most_at_once()) - 1
    started = []
    for _ in range(helpers):
        # A daemon, so that an interrupt of this process does not wait.
        thread = threading.Thread(
            target=ask_some, args=(waiting,), name="opgraft-probing", daemon=True
        )
        if _is_started(thread):
            started.append(thread)

    ask_some(own)
    ask_some(waiting)
    for thread in started:
        thread.join()
    return [answers[offer] for offer in offers]


def _is_started(thread: threading.Thread) -> bool:
    """Start a thread; return False if this process may start no more."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _most_at_once() -> int:
    """Return the number of probes at the same time, by the files left to open."""
    import resource  # which nobody needs who has no other platforms

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return _AT_ONCE
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError:  # this system does not tell, or no file can be opened any more
        opened = _FILES
    return max(1, min(_AT_ONCE, (most - opened) // _FILES))


def run_probe(offer: Offer, machine: Machine) -> Evidence:
    """Import the probe and call it here.

    Raises:
        ProbeFailed: as for ``ask``.
    """
    return _probed(offer, machine)[1]


def _probed(offer: Offer, machine: Machine) -> tuple[PlatformSpec, Evidence]:
    """Import the probe and call it here; returns the object of the entry point, too.

    Raises:
        ProbeFailed: as for ``ask``.
    """
    spec = None
    try:
        spec = spec_of(offer)
        if not isinstance(spec, PlatformSpec):
            raise ProbeFailed(
                f"{offer.value} is a {type(spec).__name__}, expected an opgraft.PlatformSpec",
                _place_of_function(spec),
            )
        with own_interrupts_as_errors():
            evidence = spec.probe(machine)
    # An interrupt from outside.
    except (ProbeFailed, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, PluginError):  # of a bridge, which says where the fault is
            raise ProbeFailed(f"probe {offer.value}: {error}", error.location) from error
        place = _place_of_error(offer, spec, error)
        raise ProbeFailed(
            f"probe {offer.value} raised {described(error)} at {place}", place
        ) from error
    if not isinstance(evidence, Evidence):
        raise ProbeFailed(
            f"probe {offer.value} returned a {type(evidence).__name__}, expected opgraft.Evidence",
            _place_of_probe(offer, spec),
        )
    return spec, evidence


def _place_of_error(offer: Offer, spec: object, error: BaseException) -> str:
    """Return ``file:line`` of the innermost code of a probe's package on the stack.

    A probe that cannot be called has no code there: its definition is named.
    """
    if offer.built_in:
        return raised_at(error)
    own = raised_in(offer.module.partition(".")[0], error)
    if own is None and isinstance(spec, PlatformSpec):
        return _place_of_probe(offer, spec)
    return own or raised_at(error)


def spec_of(offer: Offer) -> Any:
    """Load the object of the entry point.

    Raises:
        ProbeFailed: its module has nothing of that name.
    """
    if offer.bridge is not None:
        return offer.load()
    module = importlib.import_module(offer.module)
    name = offer.value.partition(":")[2].partition("[")[0].strip()
    # Of a dotted name the import tells itself which part is missing.
    if "." not in name and not hasattr(module, name):
        raise ProbeFailed(
            f"the entry point {offer.name} = {offer.value} in {offer.group} names {name!r}, which "
            f"{offer.module} does not have: {close_matches(name, vars(module))} Correct it and "
            "install the distribution again."
        )
    return offer.load()


def _ask_child(offer: Offer, machine: Machine, time_limit: float, is_late: bool) -> Evidence:
    # Built-in platforms need not wait for these imports.
    child = importlib.import_module("opgraft.machine.child")
    private = {}
    for name, value in os.environ.items():
        if name not in child.NEEDED:
            private[name] = value
    private |= machine.variables()
    try:
        bridge = offer.bridge.value if offer.bridge else ""
        arguments = (offer.name, offer.value, str(machine.root), bridge)
        what = f"the probe of platform {offer.name!r} of {offer.provider}"
        with told_when_late(what, offer.provider, time_limit):
            reply = child.ask_child(_CHILD, arguments, machine.to_dict(), time_limit)
        return _evidence(reply, what, offer, private)
    except LostChildError as error:
        what = masked(f"probe {offer.value}: {error}", private)
        # It may be in order, and be stopped for the time that others took.
        if is_late:
            raise ProbeFailed(f"{what}; it began late, behind other probes") from error
        confine = importlib.import_module("opgraft.plugins.quarantine").confine
        raise ProbeFailed(f"{what}; {confine(offer.provider, what)}") from error
    except (ChildError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeFailed(masked(f"probe {offer.value}: {error}", private)) from error


def _evidence(reply: dict[str, Any], what: str, offer: Offer, private: dict[str, str]) -> Evidence:
    """Return the evidence in the reply of a child, without values of private variables.

    Args:
        reply: the reply. Remarks are taken out, and kept as findings.
        what: the probe, in words.
        offer: the offer of the probe.
        private: variable → value. Variables that the probe has asked for are taken out.

    Raises:
        ProbeFailed: the probe has failed.
    """
    if "failure" in reply:
        raise ProbeFailed(masked(reply["failure"], private), reply["location"])
    # A probe tells what it has asked for, so these values may be shown.
    for name in reply.pop("asked"):
        private.pop(name, None)
    for remark in reply.pop("remarks"):
        message = f"{what} {remark['message']}"
        _keep(Finding(message, offer.provider, remark["location"]))
    without_secrets = masked(reply, private)
    return Evidence.from_dict(mapped(without_secrets, shortened))


def _keep(finding: Finding) -> None:
    """Keep a finding about a probe for the doctor."""
    with host_state().lock:
        findings = PLATFORM_FINDINGS.get()
        if finding not in findings:
            findings.append(finding)


class _WatchedVariables(dict[str, str]):
    """Variables with a note of the names in queries. A loop over all is no query."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.names: set[str] = set()
        self.listed = False

    @property
    def asked(self) -> list[str]:
        """Return the names of queried variables."""
        return [] if self.listed else sorted(self.names)

    def __iter__(self) -> Iterator[str]:
        self.listed = True
        return super().__iter__()

    def keys(self) -> Any:
        self.listed = True
        return super().keys()

    def items(self) -> Any:
        self.listed = True
        return super().items()

    def values(self) -> Any:
        self.listed = True
        return super().values()

    def copy(self) -> dict[str, str]:
        self.listed = True
        return super().copy()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


class _Before(NamedTuple):
    """The state of a process before the probe runs.

    Attributes:
        started: the time.
        devices: the open device files.
        has_torch: torch is imported.
    """

    started: float
    devices: frozenset[str]
    has_torch: bool

    @classmethod
    def now(cls) -> _Before:
        started = time.monotonic()
        devices = _open_devices()
        return cls(started, devices, _TORCH in sys.modules)


def _remarks(offer: Offer, spec: PlatformSpec, before: _Before) -> Iterator[dict[str, str]]:
    """Yield forbidden deeds of a probe with ``file:line``. Call this in the probe's process."""
    seconds = time.monotonic() - before.started
    place = _place_of_probe(offer, spec)
    if seconds >= SLOW:
        waits = f"took {seconds:.1f} s, and each command waits for it"
        told = f"{waits}: read files, and ask no tool or device"
        yield {"message": told, "location": place}
    # A bridge runs the code of another host's plugin, which may need torch.
    if _TORCH in sys.modules and not before.has_torch and offer.bridge is None:
        told = "imports torch, which takes seconds and may create a device context: read files only"
        yield {"message": told, "location": _import_of(_TORCH, offer.module) or place}
    devices = sorted(_open_devices() - before.devices)
    if devices:
        opened = f"leaves {', '.join(devices)} open, as a device context does"
        told = f"{opened}: read files below machine.root only"
        yield {"message": told, "location": place}


def _place_of_probe(offer: Offer, spec: PlatformSpec) -> str:
    """Return ``file:line`` of a probe, or of another host's function behind a bridge."""
    named: Any = spec.probe
    if offer.bridge is not None:
        named = sys.modules.get(offer.module)
        _, _, path = offer.value.partition("[")[0].partition(":")
        for part in path.strip().split("."):
            named = getattr(named, part, None)
    return _place_of_function(named) or offer.value


def _place_of_function(named: Any) -> str | None:
    """Return ``file:line`` of a function, ``None`` for other objects."""
    with suppress(ValueError):  # of functions that wrap each other
        named = inspect.unwrap(named)
    code = getattr(named, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None


def _import_of(package: str, module: str) -> str:
    """Return ``file:line`` of the import of another package by the probe's package."""
    own, _, _ = module.partition(".")
    for name, each in list(sys.modules.items()):
        top, _, _ = name.partition(".")
        file = getattr(each, "__file__", None)
        if top != own or not isinstance(file, str):
            continue
        try:
            tree = ast.parse("".join(_source_of(each, file)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for statement in _run_at_import(tree.body):
            if package in _packages_of(statement):
                return f"{file}:{statement.lineno}"
    return ""


def _run_at_import(statements: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the statements of an import, not those of functions and type checkers."""
    for node in statements:
        if isinstance(node, ast.stmt):
            yield node
        below = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            below = iter(node.orelse)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from _run_at_import(below)


def _packages_of(statement: ast.stmt) -> set[str]:
    """Return the packages in an import; none for another statement or a relative import."""
    names: list[str] = []
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom) and not statement.level:
        names = [statement.module or ""]
    return {name.partition(".")[0] for name in names}


def _source_of(module: Any, file: str) -> list[str]:
    """Return the lines of a module's source, from an archive too; none if there is no source."""
    with suppress(Exception):  # of a loader that somebody else wrote
        return linecache.getlines(file, vars(module))
    return []


def _open_devices() -> frozenset[str]:
    """Return the open device files of this process, not those of every process."""
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # of a file that is closed meanwhile
            target = os.readlink(entry)
            if is_device_file(target):
                found.add(target)
    return frozenset(found)


def is_device_file(path: str) -> bool:
    """Return True for the file of a device, False for files of every process."""
    return path.startswith("/dev/") and not _OF_EVERYBODY.fullmatch(path)


def answer(
    reply_to: int, machine: Mapping[str, Any], name: str, value: str, root: str, bridge: str
) -> None:
    """Run the probe in the child, and write the evidence to the file descriptor ``reply_to``."""
    _ANSWERING.set()
    through = Offer(PLATFORM_BRIDGES, name, bridge, Provider(name)) if bridge else None
    offer = Offer(PLATFORM_GROUP, name, value, Provider(name), bridge=through)
    given = Machine.from_dict(Path(root), machine)
    asked = _WatchedVariables(given.environ)
    before = _Before.now()
    try:
        spec, evidence = _probed(offer, replace(given, environ=asked))
        reply = evidence.to_dict()
        reply["asked"] = asked.asked
        reply["remarks"] = list(_remarks(offer, spec, before))
    except ProbeFailed as failure:
        reply = {"failure": str(failure), "location": failure.location}
    # Not to the standard output: the probe may print.
    with open(reply_to, "w", encoding="utf-8") as pipe:
        json.dump(reply, pipe)
    os._exit(0)  # threads of the probe may go on for ever
