"""Faults that are planted, and what is asked of the host for each of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import opgraft
import torch
from conftest import Site
from opgraft import functional
from opgraft.base.text import printable
from opgraft.cli import cli
from opgraft.cli.plugins_doctor import found
from opgraft.errors import OpgraftError
from opgraft.ops import RMSNorm
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state

GOOD = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
class BrixRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return RMSNorm.forward_native(self, x, residual)
@opgraft.hookimpl
def opgraft_register_ops(platform):
    RMSNorm.register_oot(BrixRMSNorm)
"""
"""A plugin in order, whose result no fault of another one changes."""

PLUGIN = "import opgraft\nplatforms = 'any'\n@opgraft.hookimpl\ndef opgraft_veto(): pass\n"
"""A plugin in order that replaces nothing."""

TIME_LIMIT = 30.0  # seconds, where the work takes milliseconds: a fault that hangs fails its row


@dataclass(frozen=True)
class Fault:
    """A fault: ``plant`` installs it, ``words`` must be told, and ``status`` is what becomes of the plugin acme.

    Without words nothing may be told: what looks like a fault is none.
    """

    plant: Callable[[Site], object]
    words: tuple[str, ...] = ()
    status: str | None = None


class TooSlowError(Exception):
    """A row took longer than its time limit."""


@contextmanager
def in_time(limit: float = TIME_LIMIT) -> Iterator[None]:
    """Fail what hangs, instead of hanging too; again and again, as the host catches what plugins raise."""
    late: list[TooSlowError] = []

    def fail(number: int, frame: FrameType | None) -> None:
        late.append(TooSlowError(f"no answer within {limit:g} s"))
        raise late[-1]

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit, limit)
    try:
        yield
        if late:
            raise late[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def answer(capsys, *arguments: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it printed; anything but an error of opgraft's escapes."""
    capsys.readouterr()
    try:
        code = cli.main(arguments, prog_name="opgraft", standalone_mode=False) or 0
    except SystemExit as end:
        code = int(end.code or 0)
    except OpgraftError as error:
        return error.exit_code, str(error)
    return code, capsys.readouterr().out


def of_brix() -> dict[str, Any]:
    """Load the plugins; what the one in order gives others: what its op is bound to and why, and its result's bits."""
    load_plugins()
    record, op = host_state().plugins["brix"], RMSNorm(4)
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    result = op(x, x.square())
    decisions = (op.decision, *(part for part in op.decision.parts if part.subject != "plugins"))
    return {
        "record": (record.status.value, record.reason, record.findings, record.notes),
        "class": op.op_class.__qualname__,
        "decisions": [(each.subject, each.chosen, each.reason) for each in decisions],
        "form": functional.rms_norm(x, op.weight, op.variance_epsilon).tolist(),
        "result": [(part.dtype, part.device, part.requires_grad, part.tolist()) for part in result],
    }


def others_are_as_they_were(alone: dict[str, Any]) -> None:
    """Load the plugins; the one that is in order serves its op as it does ``alone``."""
    assert of_brix() == alone
    assert alone["class"] == "BrixRMSNorm"


def doctor_finds() -> list[str]:
    """What the doctor finds of what this process has loaded, the checks of kernels aside."""
    return [
        printable(str(finding)) for finding in found(host_state().plugins.values(), loaded=False)
    ]


def status_of(name: str) -> str | None:
    """What became of a plugin, ``None`` where there is none."""
    record = host_state().plugins.get(name)
    return record and record.status.value


def info(site: Site, name: str = "acme", version: str = "1.0") -> Path:
    """The folder of a distribution's metadata."""
    return site.folder / f"{name}-{version}.dist-info"


def tried(site: Site, capsys, alone: dict[str, Any], fault: Fault) -> str:
    """Plant a fault beside brix, and return what 'opgraft plugins list' and the warnings of a process say."""
    fault.plant(site)
    opgraft.reset()
    with in_time():
        code, listed = answer(capsys, "plugins", "list")
        assert code == 0, listed
        others_are_as_they_were(alone)
    assert status_of("acme") == fault.status
    return listed
