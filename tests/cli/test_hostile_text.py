"""Text that others wrote, planted wherever opgraft reads some, and what of it reaches a terminal."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from opgraft.base.text import described, printable
from opgraft.machine.machine import RECORD
from support.machines.build import build

HOSTILE = "\x1b]0;owned\x07\x9b2Jev\u202eil\u2066\u2028x\r\nFORGED: nothing wrong\udcff"
IN_A_NAME = "ev\x1b[31m\u202eil"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ü, 猫, 🐈", "plain, ü, 猫, 🐈"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\u202e\u2066\u200f\u2028\x85\x9b", "\\u202e\\u2066\\u200f\\u2028\\x85\\x9b"),
        ("\udcff", "\\udcff"),
        (
            "\u0645\u06cc\u200c\u062e\u0648, 👩\u200d🔬, 全\u3000角",
            "\u0645\u06cc\u200c\u062e\u0648, 👩\u200d🔬, 全\u3000角",
        ),
        ("", ""),
    ],
)
def test_printable(text: str, shown: str) -> None:
    """What moves, hides or forges text is shown as an escape, and writing of all kinds is left alone."""
    assert printable(text) == shown
    assert printable(shown) == shown
    assert printable(text).encode() == shown.encode()


class Unprintable(Exception):  # noqa: N818  # what a plugin may raise
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("a\n  b\x1b"), "ValueError: a b\\x1b"),
        (SystemExit(), "SystemExit"),
        (Unprintable(), "Unprintable (its message cannot be printed: RuntimeError)"),
    ],
)
def test_described(error: BaseException, words: str) -> None:
    """An exception of any kind becomes one line that names its type."""
    assert described(error) == words


def assert_harmless(result: subprocess.CompletedProcess[bytes]) -> str:
    """Each line on stdout and stderr is what ``printable`` lets through, none forged; wrapped ones are indented."""
    text = (result.stdout + result.stderr).decode("utf-8")
    assert [line for line in text.split("\n") if printable(line) != line] == []
    assert [line for line in text.split("\n") if line.startswith("FORGED")] == []
    assert "Traceback" not in result.stderr.decode("utf-8"), text
    return text


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def run(warm_python: str) -> Run:
    """Run the command line with folders on its path in a folder; what it prints is not decoded."""

    def run(
        folders: list[Path], cwd: Path, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[bytes]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}
        command = [warm_python, "-m", "opgraft", *arguments]
        return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, check=False)

    return run


PLUGIN = f"""
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
def fail(platform):
    raise ValueError({HOSTILE!r})
Norm = type({IN_A_NAME!r}, (RMSNorm,), {{"forward_oot": lambda self, x, residual=None: x, "__module__": __name__}})
RMSNorm.register_oot(Norm)
RMSNorm.register_oot(type("Other", (RMSNorm,), {{"forward_oot": lambda self, x, residual=None: x}}), when=fail)
@opgraft.hookimpl
def opgraft_register_ops(platform): ...
"""
VETOED = f"import opgraft\nplatforms = 'any'\n@opgraft.hookimpl\ndef opgraft_veto(platform): return {HOSTILE!r}\n"
PROBE = f"return Evidence(False, {HOSTILE!r}, (Device({HOSTILE!r}),), (Fact({HOSTILE!r}, {HOSTILE!r}),), {HOSTILE!r})"


@pytest.fixture
def hostile_sites(site, tmp_path: Path) -> list[Path]:
    """Plugins with hostile names, reasons, errors and classes, in a folder whose own name is hostile."""
    place = type(site)(tmp_path / f"{IN_A_NAME}\nFORGED")
    place.folder.mkdir()
    for name, source in (
        ("good", PLUGIN),
        ("vetoed", VETOED),
        ("broken", f"raise ValueError({HOSTILE!r})"),
    ):
        points = {"opgraft.plugins": [f"{name} = {name}"]}
        place.install(name, {f"{name}.py": source}, points)
        info = place.folder / f"{name}-1.0.dist-info/METADATA"
        info.write_text(
            f"Metadata-Version: 2.1\nName: {name}{IN_A_NAME}\n FORGED\nVersion: 1{IN_A_NAME}\n"
        )
    site.platform(
        "acme", probe=PROBE.replace("return", "from opgraft import Device, Fact\n    return")
    )
    site.platform("bad", probe=f"raise ValueError({HOSTILE!r})")
    site.install("malformed", {}, f"[opgraft.plugins]\n{IN_A_NAME} = x")
    return [place.folder, site.folder]


COMMANDS = [
    ("detect", "--all"),
    ("plugins", "list"),
    ("plugins", "show", "broken"),
    ("plugins", "show", "broken", "--load"),
    ("plugins", "doctor"),
    ("ops", "list", "--details"),
    ("ops", "explain", "rms_norm"),
    ("env",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_plugins_say(
    run: Run, hostile_sites: list[Path], tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Names, versions, paths, classes, reasons and errors of plugins are shown, and do nothing."""
    shows_variables = command[0] in ("detect", "env")
    variables = {"OMP_NUM_THREADS": HOSTILE} if shows_variables else {}
    result = run(hostile_sites, tmp_path, *command, OPGRAFT_LOG="debug", **variables)
    assert "\\x1b" in assert_harmless(result)
    assert (
        run(hostile_sites, tmp_path, *command, PYTHONIOENCODING="ascii").returncode
        == result.returncode
    )


def test_what_a_recorded_machine_says(run: Run, tmp_path: Path) -> None:
    """Hardware names, variables and versions in a bug report are shown, and do nothing; nor does its folder's name."""
    root = build("nvidia-two-by-uuid", tmp_path / f"{IN_A_NAME}\nFORGED")
    (root / "proc/cpuinfo").write_text(
        f"processor : 0\nmodel name : {IN_A_NAME}\n", encoding="utf-8"
    )
    record = json.loads((root / RECORD).read_text())
    record["environ"]["CUDA_VISIBLE_DEVICES"] = HOSTILE
    record["torch"] = {"version": HOSTILE, "backends": {}}
    (root / RECORD).write_text(json.dumps(record))
    text = assert_harmless(
        run(
            [],
            tmp_path,
            "detect",
            "--all",
            "--root",
            str(root),
            "--record",
            str(tmp_path / "new\x1b"),
        )
    )
    assert "\\u202e" in text
    (root / RECORD).write_text(json.dumps({**record, "environ": {HOSTILE: 1}}))
    broken = run([], tmp_path, "detect", "--root", str(root))
    assert broken.returncode == 2
    assert_harmless(broken)


def test_what_a_checkpoint_says(run: Run, tmp_path: Path) -> None:
    """Names and values in the files of a model, and lines of text, are shown, and do nothing."""
    folder = tmp_path / f"{IN_A_NAME}\nFORGED"
    folder.mkdir()
    for config in (
        {"architectures": HOSTILE},
        {"attn_implementation": HOSTILE},
        {"model_type": HOSTILE},
    ):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / f"x{IN_A_NAME}.bin").touch()
        result = run([], tmp_path, "run", str(folder), "the cat")
        assert result.returncode == 2
        assert_harmless(result)
    (tmp_path / "lines.txt").write_text(f"{IN_A_NAME}\nthe cat\n", encoding="utf-8")
    result = run([], tmp_path, "run", "minilm", "--input", "lines.txt")
    assert result.returncode == 0
    assert "ev\\x1b[31m\\u202eil" in assert_harmless(result)
