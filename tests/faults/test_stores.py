"""Files that opgraft keeps for itself: corrupt, written by two processes at once, or by one that is killed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
from opgraft import CompilationConfig, OpgraftConfig, set_config
from opgraft.base.text import printable
from opgraft.binding.measurements import OpMeasurement, ProfileFile, TimedChoice
from opgraft.cli import kept_results
from opgraft.compilation.cache import CompilationCache
from opgraft.errors import CacheEntryError, ConfigError
from opgraft.ops import ReLUSquaredActivation
from opgraft.plugins import locking, making_locks, quarantine
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from support.faults.planting import PLUGIN, in_time
from support.faults.store_rows import ALL, NO_FILES, SIGNED, WRITERS

WHOLE = 100_000


def told_of_a_lockfile(path: Path) -> str:
    with set_config(OpgraftConfig(lockfile=str(path))), pytest.raises(ConfigError) as refused:
        opgraft.load_plugins()
    return str(refused.value)


def told_of_measurements(path: Path) -> str:
    with set_config(
        OpgraftConfig(
            compilation_config=CompilationConfig(custom_ops=["auto"], tuning_file=str(path))
        )
    ):
        op = ReLUSquaredActivation()
    return next(part.reason for part in op.decision.parts if part.subject == "measurement of relu2")


def told_of_a_quarantine(_: Path) -> str:
    opgraft.load_plugins()
    assert host_state().plugins["acme"].status.value == "activated"
    (finding,) = quarantine.findings()
    return finding.message


def told_of_an_entry(path: Path) -> str:
    with pytest.raises(CacheEntryError) as refused:
        CompilationCache(path.parent.parent, 1 << 20).read(path.parent.name)
    return f"{refused.value} {path}"


def written(folder: Path) -> dict[str, tuple[Path, Callable[[Path], str]]]:
    """Write files of opgraft's own; returns where it is, and what tells of it when it is read."""
    states, key = Path(os.environ["XDG_STATE_HOME"]) / "opgraft", "0" * 40
    making_locks.write_rows(
        folder / "opgraft.lock", [locking.LockedPackage("acme", "1.0", "00", False)]
    )
    timed = tuple(
        TimedChoice(name, Provider(name, "1"), "kernel", {"shape": 1.0})
        for name in ("opgraft", "native")
    )
    ProfileFile(folder / "tuning.json").add({"relu2": OpMeasurement("native", 1, "today", timed)})
    quarantine.confine(Provider("acme", "1.0"), "it crashed")
    cache = CompilationCache(folder / "cache", 1 << 20)
    with cache.locked(key), cache.written(key) as (entry, _):
        (entry / "code").write_bytes(b"code" * 10)
    return {
        "a lockfile": (folder / "opgraft.lock", told_of_a_lockfile),
        "measurements": (folder / "tuning.json", told_of_measurements),
        "a record of a quarantine": (states / "quarantine/acme.json", told_of_a_quarantine),
        "an entry of the cache": (cache.folder / key / "sums.json", told_of_an_entry),
        "code in the cache": (cache.folder / key / "code", told_of_an_entry),
    }


JSON = ("a lockfile", "measurements", "a record of a quarantine", "an entry of the cache")
FILES = [(name, kind) for name in JSON for kind in ALL] + [
    ("code in the cache", kind) for kind in NO_FILES
]
BRIEFLY = ("torn", "a pipe")
"""Kinds that are asked of each file whenever tests run."""


def put(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file anew, or something else in its place."""
    try:
        make(path)
    except FileExistsError:
        path.unlink()
        make(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*row, marks=[] if row[1] in BRIEFLY else [pytest.mark.faults]) for row in FILES],
)
def test_a_file_that_is_none(site, caplog, tmp_path: Path, name: str, kind: str) -> None:
    """It does not count: what is told names it and the fault in one line, and nobody waits for it."""
    site.plugin("acme", PLUGIN)
    path, tell = written(tmp_path)[name]
    opgraft.reset()
    make, words = ALL[kind]
    put(path, make)
    with in_time():
        said = " ".join((tell(path), *caplog.messages))
    assert str(path) in said
    # The digest is wrong, so nothing is parsed.
    is_unread = kind == "nested" and name == "a record of a quarantine"
    assert words in said or is_unread
    assert printable(said) == said


@pytest.mark.parametrize("kind", [*ALL, *SIGNED])
def test_a_kept_result_that_is_none(caplog, kind: str) -> None:
    """A warning names it, and the next one takes its place where that can be."""
    kept_results.keep("acme", {"number": 1})
    path = Path(os.environ["XDG_STATE_HOME"]) / "opgraft/doctor/acme.json"
    make, words = {**ALL, **SIGNED}[kind]
    put(path, make)
    with in_time():
        assert kept_results.look_up("acme") is None
        (told,) = caplog.messages
        kept_results.keep("acme", {"number": 3})
    assert f"the kept result {path} cannot be used and is made anew: " in told
    assert words in told or kind == "nested"  # where it is not read, as its digest is wrong
    if path.is_file() and not path.is_symlink():
        kept = kept_results.look_up("acme")
        assert kept is not None
        assert kept.report == {"number": 3}


@pytest.mark.parametrize("name", WRITERS)
def test_two_that_write_at_once_and_are_killed(
    site, warm_python: str, tmp_path: Path, name: str
) -> None:
    """Whoever reads meanwhile, or after that, finds a whole file."""
    site.plugin("acme", PLUGIN)
    write, read = WRITERS[name]
    head = f"import sys\nfrom pathlib import Path\nfolder = {str(tmp_path)!r}\n"
    environ = {**os.environ, "PYTHONPATH": str(site.folder)}
    code = f"{head}{write}\nwrite(0)\nprint(flush=True)\nfor n in range(10**9): write(n)"
    writers = [
        subprocess.Popen([warm_python, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found: dict[str, object] = {}
    exec(head + read, found)  # noqa: S102  # of the table
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "\n"
        lengths = set()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            lengths.add(found["read"]())  # type: ignore[operator]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert lengths | {found["read"]()} == {WHOLE}  # type: ignore[operator]
