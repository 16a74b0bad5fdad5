"""What a recording shows in place of ids, serial numbers, home folder and host name."""

from __future__ import annotations

import json
import random
import shutil
import socket
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opgraft.machine.machine import RECORD, Machine
from opgraft.machine.recording import RecordingMachine
from opgraft.machine.scrubbing import Scrubber
from opgraft.platforms.cuda.probe import probe as probe_cuda
from opgraft.platforms.rocm.probe import probe as probe_rocm
from support.machines.build import build

PATHS = ("/proc/cpuinfo", "/proc/driver/nvidia/version", "/sys/a", "/sys/a/b", "/sys/c")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Serial\t\t: 10000000deadbeef", "Serial\t\t: 0"),
        ("Serial Number: \t SN1 2", "Serial Number: \t 0"),
        ("Board Serial Number : x\r", "Board Serial Number : 0\r"),
        ("serial=SN1", "serial=0"),
        ("serial SN1", "serial 0"),
        ("serial number SN1", "serial number 0"),
        ("unique_id 0", "unique_id 0"),
        ("unique_id 123", f"unique_id {int('1' * 16, 16)}"),
        ("unique_id: 0x4d1c4f6e9a2b0000", "unique_id: 0x1111111111111111"),
        ("unique_id ?", "unique_id 0"),
        ("Serial\t:", "Serial\t:"),
        ("flags\t: avx serialize fpu", "flags\t: avx serialize fpu"),
        (
            "GPU UUID: GPU-4D1C4F6E-1111-2222-3333-444455556666",
            "GPU UUID: GPU-11111111-1111-1111-1111-111111111111",
        ),
        ("GPU-0 and GPU-Accelerated 0123456789", "GPU-0 and GPU-Accelerated 0123456789"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module  550.54.15  Release Build  (jo.doe@build-7.acme.com)",
            "NVRM version: NVIDIA UNIX Open Kernel Module  550.54.15  Release Build  (user@host)",
        ),
        (
            "Linux version 6.1 (root+ci@ip-10-0-0-7) (gcc 12)",
            "Linux version 6.1 (user@host) (gcc 12)",
        ),
        ("mail jo@localhost, or a@b.", "mail user@host, or user@host."),
        ("built by root@[fe80::1], in ACME\\eve@db", "built by user@host, in user@host"),
        ("by dave%corp@host.local:/src", "by user@host:/src"),
        ("by émile@hôte.fr", "by user@host"),
        ("built by o'brien@host9", "built by user@host"),
        ("S/N: PF3XYZ12", "S/N: 0"),
        ("devices/n: 3", "devices/n: 3"),
        ("address 3c:7c:3f:1e:22:0a", "address 00:00:00:00:00:00"),
        ("0000:3c:00.0 and 01:02:03", "0000:3c:00.0 and 01:02:03"),
        ("CUDA_HOME=/home/alice/cuda", "CUDA_HOME=/home/user/cuda"),
        ("in /Users/bob/rocm:/opt/home/x", "in /Users/user/rocm:/opt/home/x"),
        ("https://jo:s3cret@db.acme.com/x", "https://user@host/x"),
        ("@decorator and 3 @ 4 and x@ y", "@decorator and 3 @ 4 and x@ y"),
    ],
)
def test_lines(line: str, shown: str) -> None:
    """Every spelling of a serial number is replaced in its line, and nothing else of the text."""
    assert Scrubber().text(f"a: 1\n{line}\nb: 2") == f"a: 1\n{shown}\nb: 2"


@pytest.mark.parametrize("name", ["serial_number", "serial", "unique_id"])
def test_a_file_that_is_a_serial_number(name: str) -> None:
    """Where the name of a file says what it holds, its text is replaced too."""
    assert "4d1c4f6e9a2b0000" not in Scrubber().file(
        f"/sys/class/drm/card0/device/{name}", "4d1c4f6e9a2b0000\n"
    )


@pytest.mark.parametrize(
    "filling", [" ", "\t", "serial ", "unique_id", "GPU-", "a1234567-", "f", "serial :"]
)
def test_large_files(filling: str, tmp_path: Path) -> None:
    """A mebibyte of anything is written down in time."""
    root = build("cpu-avx2", tmp_path / "machine")
    (root / "proc/cpuinfo").write_text("serial" + filling * ((1 << 20) // len(filling)))
    recording = RecordingMachine(Machine.recorded(root))
    assert recording.read("/proc/cpuinfo")
    recording.write(tmp_path / "recording")
    assert (tmp_path / "recording/proc/cpuinfo").is_file()


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(PATHS),
        st.one_of(st.binary(max_size=200), st.text().map(str.encode), st.none()),
    )
)
def test_broken_trees_are_recorded(tmp_path: Path, contents: dict[str, bytes | None]) -> None:
    """Whatever stands in a tree, what was read of it can be written down, as files, links or folders."""
    for folder in ("machine", "recording"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    machine = Machine(tmp_path / "machine", {}, packages={})
    for path, content in contents.items():
        place = machine.path(path)
        if (
            any(parent.is_file() or parent.is_symlink() for parent in place.parents)
            or place.exists()
        ):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            place.symlink_to("./")
        else:
            place.write_bytes(content)
    recording = RecordingMachine(machine)
    for path in PATHS:
        recording.read(path), recording.link(path), recording.exists(path), recording.names(path)
    recording.write(tmp_path / "recording")
    assert Machine.recorded(tmp_path / "recording").packages == {}


def decisions(
    root: Path, variable: str, value: str, folder: Path
) -> list[tuple[bool, list[bool], str]]:
    """What the probes say of the visible devices of a machine and of its recording."""
    record = json.loads((root / RECORD).read_text())
    record["environ"] = {variable: value}
    (root / RECORD).write_text(json.dumps(record))
    probe = probe_rocm if variable == "ROCR_VISIBLE_DEVICES" else probe_cuda
    recording = RecordingMachine(Machine.recorded(root))
    probe(recording)
    recording.write(folder)
    found = [probe(Machine.recorded(place)) for place in (root, folder)]
    return [(one.available, [device.hidden for device in one.devices], one.remedy) for one in found]


@pytest.mark.parametrize("seed", range(8))
def test_variables_go_on_naming_nvidia_devices(seed: int, tmp_path: Path) -> None:
    """Full ids and first digits, of one GPU, of several or of none, choose in a recording what they choose here."""
    rng = random.Random(seed)  # noqa: S311
    root = build("nvidia-4-h100", tmp_path / "machine")
    ids = [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(4)]
    ids[1] = ids[0][:10] + ids[1][10:]  # two that begin alike
    for path, one in zip(
        sorted(root.glob("proc/driver/nvidia/gpus/*/information")), ids, strict=True
    ):
        path.write_text(
            "\n".join(
                f"GPU UUID: GPU-{one}" if "UUID" in x else x for x in path.read_text().split("\n")
            )
        )
    lengths = (36, 20, 13, 11, 10, 9, 8, 4, 1)
    values = [f"GPU-{ids[rng.randrange(4)][:length]}" for length in lengths] + [
        f"GPU-{ids[0].upper()},GPU-{ids[2][:8]}"
    ]
    values += [
        f"GPU-{uuid.UUID(int=rng.getrandbits(128))}",
        ids[2][:8],
        f"0,GPU-{ids[3][:9]}",
        f"MIG-GPU-{ids[3]}/7/0",
    ]
    for number, value in enumerate(values):
        folder = tmp_path / str(number)
        here, there = decisions(root, "CUDA_VISIBLE_DEVICES", value, folder)
        assert (here[0], here[1]) == (there[0], there[1]), value
        text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
        assert not any(one[:8] in text for one in ids)


@pytest.mark.parametrize("length", [16, 15, 14, 8, 1])
def test_variables_go_on_naming_amd_devices(length: int, tmp_path: Path) -> None:
    """AMD's files give an id in decimal and its variables in hexadecimal: both are replaced by the same other id."""
    rng = random.Random(length)  # noqa: S311
    root = build("amd-8-mi300x-spx", tmp_path / "machine")
    ids = [rng.getrandbits(64) | 1 << 60 for _ in range(8)]
    ids[5] = ids[4] ^ 1
    left = iter(ids)
    for path in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        lines = path.read_text().split("\n")
        path.write_text(
            "\n".join(f"unique_id {next(left)}" if x.startswith("unique_id") else x for x in lines)
        )
    for number, one in enumerate(ids):
        here, there = decisions(
            root, "ROCR_VISIBLE_DEVICES", f"GPU-{one:016x}"[: 4 + length], tmp_path / str(number)
        )
        assert (here[0], here[1]) == (there[0], there[1])
        assert here[0] or length < 16
        text = "".join(
            path.read_text() for path in (tmp_path / str(number)).rglob("*") if path.is_file()
        )
        assert not any(str(other) in text or f"{other:016x}"[:8] in text for other in ids)


@pytest.mark.parametrize("host", ["nvidia", "tegra234", "cuda", "GPU", "123"])
def test_the_name_of_the_host_decides_nothing(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is called as what probes look for is recorded as any other."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    recording = RecordingMachine(Machine.recorded(build("nvidia-jetson", tmp_path / "machine")))
    first = probe_cuda(recording)
    recording.write(tmp_path / "recording")
    assert probe_cuda(Machine.recorded(tmp_path / "recording")) == first
    assert Scrubber().value("123,cuda,GPU,nvidia") == "123,cuda,GPU,nvidia"


def test_host_names_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name is replaced as a whole word, with its domain and without."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box7.example.org")
    assert (
        Scrubber().value("box7,box7.example.org:80,box77,my-box7") == "host,host:80,box77,my-box7"
    )


@pytest.mark.parametrize(
    ("home", "shown"),
    [
        ("/", "a/b.c/home/me/x"),
        ("", "a/b.c/home/me/x"),
        ("/home/me/", "a/b.c~/x"),
        ("/home/m", "a/b.c/home/me/x"),
    ],
)
def test_home_folders(home: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a home folder that is one is replaced, and only as a whole."""
    monkeypatch.setenv("HOME", home)
    assert Scrubber().value("a/b.c/home/me/x") == shown


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder can record all the same."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert Scrubber().value("/root/me") == "/root/me"
