"""Asking a platform's probe, in this process for built-in ones and in a child process for everyone else's.

A third party's probe may hang, crash the interpreter or raise whatever it likes: the child has a time limit, and every
outcome becomes ``Evidence``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from opgraft.decision import Provider
from opgraft.errors import PlatformError
from opgraft.evidence import Evidence
from opgraft.machine import RECORD, Machine
from opgraft.platform import PlatformSpec
from opgraft.plugins.discovery import PLATFORM_GROUP, Offer

TIME_LIMIT = 10.0  # seconds

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from opgraft.plugins.probing import answer; answer(*sys.argv[2:])"
)


_ANSWERING = threading.Event()
"""Set in a child process that runs a probe, which must not start children of its own."""


class ProbeFailed(Exception):  # noqa: N818  # an outcome that selection records, never one that users catch
    """A probe gave no evidence; the message says why."""


def ask(offer: Offer, machine: Machine, time_limit: float = TIME_LIMIT) -> Evidence:
    """The evidence of an offered platform's probe.

    Raises:
        ProbeFailed: it raised, crashed, ran past ``time_limit`` seconds or answered something else than ``Evidence``.
    """
    if offer.built_in:
        return run_probe(offer, machine)
    if _ANSWERING.is_set():
        raise PlatformError(
            f"platform {offer.name!r} was probed from within another platform's probe: a module that has a "
            "PlatformSpec must not use opgraft.current_platform() or construct ops when it is imported"
        )
    return _ask_child(offer, machine, time_limit)


def run_probe(offer: Offer, machine: Machine) -> Evidence:
    """Import the probe and call it here.

    Raises:
        ProbeFailed: as for ``ask``.
    """
    try:
        spec = offer.load()
        if not isinstance(spec, PlatformSpec):
            raise ProbeFailed(f"{offer.value} is a {type(spec).__name__}, expected an opgraft.PlatformSpec")
        evidence = spec.probe(machine)
    except (Exception, SystemExit) as error:
        if isinstance(error, ProbeFailed):
            raise
        raise ProbeFailed(f"probe {offer.value} raised {error!r}") from error
    if not isinstance(evidence, Evidence):
        raise ProbeFailed(f"probe {offer.value} returned a {type(evidence).__name__}, expected opgraft.Evidence")
    return evidence


def _ask_child(offer: Offer, machine: Machine, time_limit: float) -> Evidence:
    path = json.dumps([str(entry) for entry in sys.path])
    command = [sys.executable, "-I", "-c", _CHILD, path, offer.name, offer.value, str(machine.root)]
    environ = {**machine.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        child = subprocess.Popen(  # noqa: S603  # our own interpreter
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ProbeFailed(f"no child process could be started for probe {offer.value}: {error}") from error
    try:
        output, complaints = child.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it may have started itself
        child.communicate()
        raise ProbeFailed(f"probe {offer.value} gave no answer within {time_limit:g} s and was stopped") from None
    errors = complaints.decode(errors="replace").strip().splitlines()
    if child.returncode != 0:
        last = f": {errors[-1]}" if errors else ""
        raise ProbeFailed(f"the process of probe {offer.value} ended with status {child.returncode}{last}")
    try:
        reply = json.loads(output)
        if "failure" in reply:
            raise ProbeFailed(reply["failure"])
        return Evidence.from_dict(reply)
    except (ValueError, KeyError, TypeError) as error:
        raise ProbeFailed(f"probe {offer.value} gave an answer that cannot be read: {error}") from error


def answer(name: str, value: str, root: str) -> None:
    """The child's side: run the probe and print its evidence as JSON; what the probe prints goes to stderr."""
    _ANSWERING.set()
    reply_to = os.dup(1)
    os.dup2(2, 1)
    offer = Offer(PLATFORM_GROUP, name, value, Provider(name))
    folder = Path(root)
    machine = Machine.recorded(folder) if (folder / RECORD).is_file() else Machine(folder)
    try:
        reply = run_probe(offer, machine).to_dict()
    except ProbeFailed as failure:
        reply = {"failure": str(failure)}
    with os.fdopen(reply_to, "w") as stdout:
        json.dump(reply, stdout)
