"""``opgraft detect --record``: what is written down stands for the machine, says nothing else, and is complete."""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from opgraft.cli import cli as command_line
from opgraft.errors import InputError, OpgraftError
from opgraft.machine.machine import RECORD, Machine
from opgraft.machine.recording import RecordingMachine
from opgraft.machine.scrubbing import Scrubber
from support.machines.build import Tree, build, machines

CARD = str(uuid.uuid4())
SERIAL = "SN1324099876"
HOST = "secret-host-17"


class Answer(NamedTuple):
    """What the command prints and ends with, as ``main`` has it."""

    exit_code: int
    output: str


def detect(*arguments: str, **variables: str) -> Answer:
    result = CliRunner().invoke(command_line, ["detect", *arguments], env=variables)
    if isinstance(result.exception, OpgraftError):
        return Answer(result.exception.exit_code, str(result.exception))
    return Answer(result.exit_code, result.output)


def contents(folder: Path) -> str:
    """Every name, text and link target below a folder."""
    paths = sorted(folder.rglob("*"))
    texts = [path.read_text() for path in paths if path.is_file() and not path.is_symlink()]
    targets = [os.readlink(path) for path in paths if path.is_symlink()]
    return "\n".join([*map(str, paths), *texts, *targets])


@pytest.mark.parametrize("name", sorted(machines()))
def test_a_recording_stands_for_its_machine(name: str, tmp_path: Path) -> None:
    """Detection says the same about the recording as about the machine, hardware without a platform included."""
    root, recording = build(name, tmp_path / "machine"), tmp_path / "recording"
    first = detect("--root", str(root), "--record", str(recording), "--json")
    assert first.exit_code == 0, first.output
    second = detect("--root", str(recording), "--json")
    assert scrubbed(second.output) == scrubbed(first.output)


def scrubbed(output: str) -> dict[str, object]:
    """What was detected; UUIDs are replaced in a recording, which the values of variables show."""
    data = json.loads(output)
    for candidate in data["decision"]["candidates"]:
        for fact in (candidate["evidence"] or {}).get("facts", ()):
            fact["value"] = "UUIDs" if "GPU-" in fact["value"] else fact["value"]
    return data


@pytest.fixture
def telling_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose files and variables hold what must not get into a bug report."""
    monkeypatch.setenv("HOME", "/home/secret-user")
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    root = build("nvidia-two-by-uuid", tmp_path / "machine")
    tree = Tree(root)
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        path.write_text(f"{path.read_text()}Serial Number: \t {SERIAL}\nGPU UUID: \t GPU-{CARD}\n")
    tree.write(
        "/proc/cpuinfo", f"processor\t: 0\nflags\t\t: avx2 serialize\nSerial\t\t: {SERIAL}\n"
    )
    record = json.loads((root / RECORD).read_text())
    record["environ"] |= {
        "CUDA_VISIBLE_DEVICES": f"GPU-{CARD}",
        "TPU_VISIBLE_CHIPS": f"/home/secret-user/chips of {HOST}",
        "PASSWORD": "hunter2",
    }
    (root / RECORD).write_text(json.dumps(record))
    return root


def test_what_identifies_a_machine_is_left_out(telling_machine: Path, tmp_path: Path) -> None:
    """UUIDs, serial numbers and the home folder are replaced, in files and in variables; in these the host's name."""
    recording = tmp_path / "recording"
    (telling_machine / "sys/bus/pci/devices/0000:00:1f.0").mkdir()
    for name, value in (("vendor", "0x1ae0"), ("device", "0x006f"), ("class", "0xff0000")):
        (telling_machine / "sys/bus/pci/devices/0000:00:1f.0" / name).write_text(value)
    assert detect("--root", str(telling_machine), "--record", str(recording)).exit_code == 0
    text = contents(recording)
    for secret in (CARD, SERIAL, HOST, "secret-user", "hunter2", "PASSWORD"):
        assert secret not in text, secret
    assert "~/chips of host" in text
    assert "avx2 serialize" in text


def test_only_variables_that_probes_ask_for(tmp_path: Path) -> None:
    """A recording of this machine holds the variables that decide, and no other."""
    recording = tmp_path / "recording"
    result = detect("--record", str(recording), CUDA_VISIBLE_DEVICES="0", SECRET_TOKEN="hunter2")  # noqa: S106
    assert result.exit_code == 0, result.output
    environ = json.loads((recording / RECORD).read_text())["environ"]
    assert "SECRET_TOKEN" not in environ
    assert "PATH" not in environ
    assert all(name.isupper() for name in environ)
    assert "hunter2" not in contents(recording)


def test_a_recording_is_small(tmp_path: Path) -> None:
    """Only what probes look at is written, not the folders around it."""
    root = build("google-tpu-v6e", tmp_path / "machine")
    (root / "proc/self").mkdir()
    (root / "proc/self/environ").write_text("SECRET=1")
    (root / "etc").mkdir()
    (root / "etc/shadow").write_text("root:secret")
    recording = tmp_path / "recording"
    assert detect("--root", str(root), "--record", str(recording)).exit_code == 0
    assert not (recording / "proc/self").exists()
    assert not (recording / "etc").exists()
    assert (recording / "proc/cpuinfo").is_file()


@pytest.mark.parametrize(
    ("target", "message"),
    [("full", "is not empty: give a new folder"), ("file", "file' is a file")],
)
def test_a_target_that_is_in_use_is_refused(target: str, message: str, tmp_path: Path) -> None:
    """A folder with anything in it, or a file, is left as it is."""
    root = build("cpu-avx2", tmp_path / "machine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    result = detect("--root", str(root), "--record", str(tmp_path / target))
    assert result.exit_code == 2
    assert message in result.output
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    """A folder that exists and is empty, and one whose parents do not exist, are both written to."""
    root = build("cpu-avx2", tmp_path / "machine")
    (tmp_path / "empty").mkdir()
    for target in ("empty", "not/there/yet"):
        assert detect("--root", str(root), "--record", str(tmp_path / target)).exit_code == 0
        assert (tmp_path / target / RECORD).is_file()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder below a file is an error with its reason."""
    root = build("cpu-avx2", tmp_path / "machine")
    (tmp_path / "file").touch()
    result = detect("--root", str(root), "--record", str(tmp_path / "file" / "recording"))
    assert result.exit_code == 2
    assert "cannot be written" in result.output


@pytest.mark.parametrize("target", ["n" * 300, "closed", "closed/recording"])
def test_a_target_that_cannot_be_looked_at(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is too long, and a folder that may not be read, are errors with their reason."""
    root = build("cpu-avx2", tmp_path / "machine")
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.lstat

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # for root, who may read any folder
    monkeypatch.setattr(
        os,
        "lstat",
        lambda path, **o: refuse(path) if closed in Path(path).parents else real(path, **o),
    )
    if target == "closed/recording":
        monkeypatch.setattr(os.path, "lexists", refuse)
    result = detect("--root", str(root), "--record", str(tmp_path / target))
    assert result.exit_code == 2
    assert "cannot be written" in result.output
    assert closed.is_dir()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("no home"), KeyboardInterrupt()]
)
def test_an_empty_folder_of_the_user_stays(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, a folder that was there is empty again, and those that were not are gone."""
    recording = RecordingMachine(Machine.recorded(build("cpu-avx2", tmp_path / "machine")))
    recording.read("/proc/cpuinfo")
    monkeypatch.setitem(recording.seen.variables.variables, "CUDA_VISIBLE_DEVICES", "0")
    assert recording.environ["CUDA_VISIBLE_DEVICES"] == "0"
    (tmp_path / "mine").mkdir()

    def fail(self: Scrubber, text: str) -> str:
        raise error

    monkeypatch.setattr(Scrubber, "value", fail)  # after the files
    for target in ("mine", "not/there"):
        with pytest.raises(InputError if isinstance(error, OSError) else type(error)):
            recording.write(tmp_path / target)
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("failing", ["symlink_to", "write_text", "touch"])
def test_nothing_half_written_is_left(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is full half way, the folder is gone afterwards."""
    root, recording = build("intel-2-max-1550", tmp_path / "machine"), tmp_path / "recording"
    written: list[bool] = []

    def full(self: Path, *arguments: object, **options: object) -> None:
        written.append(any(recording.rglob("*")))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, failing, full)
    result = detect("--root", str(root), "--record", str(recording))
    monkeypatch.undo()
    assert result.exit_code == 2
    assert "No space left on device" in result.output
    assert written
    assert not recording.exists()


def test_a_decision_that_fails_is_recorded_too(tmp_path: Path) -> None:
    """Where the platform asked for cannot be used, the recording shows why."""
    root, recording = (
        build("intel-max-torch-without-xpu", tmp_path / "machine"),
        tmp_path / "recording",
    )
    result = detect("--root", str(root), "--record", str(recording), OPGRAFT_PLATFORM="xpu")
    assert result.exit_code == 3
    again = detect("--root", str(recording), OPGRAFT_PLATFORM="xpu")
    assert again.exit_code == 3
    assert "built without xpu" in again.output


def test_a_recording_that_is_damaged(tmp_path: Path) -> None:
    """A folder without its machine.json, or with a damaged one, is named with the reason."""
    root, recording = build("cpu-avx2", tmp_path / "machine"), tmp_path / "recording"
    assert detect("--root", str(root), "--record", str(recording)).exit_code == 0
    (recording / RECORD).write_text("{")
    assert detect("--root", str(recording)).exit_code == 2
    shutil.rmtree(recording)
    assert detect("--root", str(recording)).exit_code == 2


def test_a_recording_is_not_taken_for_this_machine(tmp_path: Path) -> None:
    """The first line says whose platform is shown; for this machine nothing is said."""
    root = build("cpu-avx2", tmp_path / "machine")
    first = detect("--root", str(root)).output.splitlines()[0]
    assert first == f"of the machine that is recorded in {root}, not of this one:"
    assert "recorded" not in detect().output


def test_platforms_that_were_not_probed_are_not_listed(site) -> None:
    """Where a setting asks for a platform the others have nothing to say; every candidate is there on request."""
    assert "not probed" not in detect("--platform", "cpu").output
    assert "cuda [opgraft" in detect("--platform", "cpu", "--all").output
    assert detect("--platform", "cpu", "--all").output.count("not probed") == 4


def test_who_built_a_driver_is_left_out(tmp_path: Path) -> None:
    """The version of a driver stays; the account and the host that built it do not."""
    root, recording = build("nvidia-4-h100", tmp_path / "machine"), tmp_path / "recording"
    version = root / "proc/driver/nvidia/version"
    built = "Kernel Module  550.54.15  Release Build  (jo.doe@build-7.acme.com)"
    version.write_text(f"NVRM version: NVIDIA UNIX Open {built}\nGCC version:  gcc 12 (ci@x)\n")
    first = detect("--root", str(root), "--record", str(recording), "--json")
    assert "550.54.15" in first.output
    assert scrubbed(detect("--root", str(recording), "--json").output) == scrubbed(first.output)
    assert "(user@host)" in contents(recording)
    assert [word for word in ("jo.doe", "build-7", "ci@x") if word in contents(recording)] == []


@pytest.mark.parametrize("option", ["--root", "--record", "--config"])
def test_an_empty_path_is_refused(option: str) -> None:
    """A variable of a shell that is not set makes an empty path, which is none of this machine."""
    answer = detect(option, "")
    assert answer.exit_code == 2
    assert (
        f"Invalid value for '{option}': the path is empty: name a file or a folder" in answer.output
    )
