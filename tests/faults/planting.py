"""Faults that are planted, and what is asked of the host for each of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import opgraft
from conftest import Site
from opgraft.cli import cli
from opgraft.errors import OpgraftError
from opgraft.ops import RMSNorm
from opgraft.plugins.host import load_plugins
from opgraft.state import host_state

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


def others_are_as_they_were() -> None:
    """Load the plugins; the one that is in order is active, and serves its op."""
    load_plugins()
    brix = host_state().plugins["brix"]
    assert (brix.status.value, brix.reason, brix.findings) == ("activated", "applies on any", ())
    assert RMSNorm(4).op_class.__name__ == "BrixRMSNorm"


def status_of(name: str) -> str | None:
    """What became of a plugin, ``None`` where there is none."""
    record = host_state().plugins.get(name)
    return record and record.status.value


def info(site: Site, name: str = "acme", version: str = "1.0") -> Path:
    """The folder of a distribution's metadata."""
    return site.folder / f"{name}-{version}.dist-info"


def tried(site: Site, capsys, fault: Fault) -> str:
    """Plant a fault, and return what 'opgraft plugins list' and the warnings of a process say."""
    site.plugin("brix", GOOD)
    fault.plant(site)
    opgraft.reset()
    with in_time():
        code, listed = answer(capsys, "plugins", "list")
        assert code == 0, listed
        others_are_as_they_were()
    assert status_of("acme") == fault.status
    return listed
