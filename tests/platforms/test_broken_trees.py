"""Trees that are damaged in every way that a file system allows: no probe raises, none hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opgraft.machine.evidence import Evidence
from opgraft.machine.machine import Machine
from opgraft.machine.recording import RecordingMachine
from support.machines.build import machines

DEADLINE = 1.0  # seconds of a processor
PATIENCE = 60.0  # seconds, on a machine that may be busy
LARGE = 10 << 20  # bytes

CONTENTS = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [
            b"",
            b"\0",
            b"-1\n",
            b"0x\n",
            b"9" * 5000,
            b"0x" + b"f" * 5000,
            "٣\n".encode(),
            b"\xff\xfe",
        ]
    ),
)
FILLINGS = st.sampled_from(
    [b"\n", b" ", b"9", b"f", b"a 1\n", b"\0", b":\t", b"10de,", b"processor\t: 1\n"]
)
DAMAGE = st.one_of(
    st.tuples(st.just("content"), CONTENTS),
    st.tuples(st.just("large"), FILLINGS),
    st.tuples(
        st.sampled_from(["missing", "denied", "loop", "dangling", "fifo", "folder", "unreadable"]),
        st.just(b""),
    ),
)


@pytest.fixture(scope="module")
def read_paths(machine_folder, built_in_probes):
    """The paths that the probes look at on a machine, and the folders that hold them."""

    def find(name: str) -> list[str]:
        recording = RecordingMachine(Machine.recorded(machine_folder(name)))
        for probe in built_in_probes.values():
            probe(recording)
        seen = recording.seen
        paths = {path.lstrip("/") for path in (*seen.files, *seen.listed, *seen.links)}
        parents = {
            str(parent) for path in paths for parent in Path(path).parents if str(parent) != "."
        }
        present = (path for path in paths | parents if os.path.lexists(machine_folder(name) / path))
        return sorted(present)

    return find


@pytest.fixture(scope="module")
def large_files(tmp_path_factory: pytest.TempPathFactory):
    """Files of 10 MB that repeat a few bytes; written once each."""
    folder = tmp_path_factory.mktemp("large")

    def make(filling: bytes) -> Path:
        path = folder / filling.hex()
        if not path.exists():
            path.write_bytes(filling * (LARGE // len(filling)))
        return path

    return make


@contextmanager
def within(limit: float) -> Iterator[None]:
    """Fail where the body takes longer than ``limit`` seconds of a processor, or waits for what does not come."""

    def stop(signum: int, frame: object) -> None:
        raise AssertionError(f"still running after {PATIENCE} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    start = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.process_time() - start < limit


def damage(place: Path, kind: str, content: bytes, large_file: Path | None) -> None:
    """Put something else in the place of a file or folder. Files are hard links: replaced, never written to."""
    if not os.path.lexists(place):
        return  # a folder above it is gone already
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()
    if kind == "content":
        place.write_bytes(content)
    elif kind == "large":
        os.link(large_file, place)
    elif kind == "loop":
        place.symlink_to(place.name)
    elif kind == "dangling":
        place.symlink_to("nowhere/at/all")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        (place / "inside").mkdir(parents=True)
    elif kind == "unreadable":
        place.write_bytes(b"secret")
        place.chmod(0)


@pytest.mark.parametrize("name", sorted(machines()))
def test_probes_survive_broken_trees(
    name: str, machine_folder, built_in_probes, read_paths, large_files, tmp_path: Path
) -> None:
    """Whatever stands where a probe looks, it answers with evidence, within a second."""
    paths = read_paths(name) or ["proc"]  # a Mac has nothing that they read

    @settings(max_examples=6, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.sampled_from(paths), DAMAGE), min_size=1, max_size=8))
    def check(damages: list[tuple[str, tuple[str, bytes]]]) -> None:
        folder = tmp_path / "machine"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(machine_folder(name), folder, symlinks=True, copy_function=os.link)
        machine = Machine.recorded(folder)
        denied = {f"/{path}" for path, (kind, _) in damages if kind == "denied"}
        for path, (kind, content) in damages:
            if kind != "denied":
                damage(
                    folder / path, kind, content, large_files(content) if kind == "large" else None
                )
        for probe in built_in_probes.values():
            with within(DEADLINE):
                evidence = probe(replace(machine, denied=machine.denied | denied, memo={}))
            assert isinstance(evidence, Evidence)
            assert list(evidence.lines()) is not None
            assert Evidence.from_dict(json.loads(json.dumps(evidence.to_dict()))) == evidence

    check()


@pytest.mark.parametrize("root", ["missing", "file"])
def test_probes_survive_a_root_that_is_no_folder(
    root: str, built_in_probes, tmp_path: Path
) -> None:
    """A root that does not exist, or is a file, is a machine without anything."""
    (tmp_path / "file").touch()
    for name, probe in built_in_probes.items():
        evidence = probe(Machine(tmp_path / root, {}, packages={}))
        assert evidence.available == (name == "cpu")
        assert evidence.devices == ()
