"""Probes that answer nonsense, or harm the process that asks: told by name, and nobody else's matter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import opgraft
import pytest
from opgraft.base.text import printable
from opgraft.machine.machine import Machine
from opgraft.plugins.discovery import discover
from opgraft.plugins.probing import is_device_file
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.plugins.selection import decide_platform
from opgraft.registry.decision import Candidate
from opgraft.registry.state import host_state
from support.faults.planting import doctor_finds, in_time
from support.faults.probe_rows import ROWS, SECRETS

HEAD = "from opgraft import Device, Fact\n    "
LONGEST = 4000  # characters of a line that anybody reads
PASSWORD = "postgres://acme:hunter2@db"  # noqa: S105  # a planted one


def decided(site, probe: str) -> tuple[Candidate, str]:
    """The end of the platform acme, and all that is told of the decision."""
    body = probe if probe.startswith("pass") else HEAD + probe.lstrip()
    site.platform("acme", probe=body)
    opgraft.reset()
    with in_time():
        _, decision = decide_platform(host_state().settings(), Machine())
    (acme,) = (candidate for candidate in decision.candidates if candidate.name == "acme")
    assert decision.chosen == "cpu"
    assert not acme.accepted
    return acme, str(decision)


@pytest.mark.parametrize("name", ROWS)
def test_probes(site, name: str) -> None:
    """The platform is left out for the reason that is told, in lines that do nothing, and another one is chosen."""
    probe, words, counts = ROWS[name]
    acme, told = decided(site, probe)
    assert words in printable(acme.reason)
    findings = doctor_finds()
    assert bool(findings) != counts, findings
    assert counts or any(words in line and "acme" in line for line in findings)
    assert (acme.evidence is not None) == counts
    assert [
        line for line in told.splitlines() if printable(line) != line or len(line) > LONGEST
    ] == []


@pytest.mark.parametrize("name", SECRETS)
def test_probes_that_tell_secrets(site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a variable that a probe quotes without having asked for it, the name stands in a report."""
    secrets = {"DATABASE_URL": PASSWORD, "ACME_TOKEN": "t0psecret"}
    monkeypatch.setenv("ACME_PROCESS", str(os.getpid()))
    for variable, value in secrets.items():
        monkeypatch.setenv(variable, value)
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setenv("ACME_PROCESS", str(holder.pid))
        acme, told = decided(site, SECRETS[name])
    finally:
        holder.communicate(b"\n")
    assert [value for value in secrets.values() if value in told + repr(acme)] == []
    if "machine.environ" in SECRETS[name] and "ACME_PROCESS" not in SECRETS[name]:
        assert "$" in told


def test_a_variable_that_a_probe_asks_for_is_shown(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides, and a report needs it."""
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "GPU-1,GPU-2")
    acme, _ = decided(
        site, "return Evidence(False, machine.environ['ACME_VISIBLE_DEVICES'] + ' hides all')"
    )
    assert acme.reason == "GPU-1,GPU-2 hides all"


HARMLESS = (
    "import os; os.open('/dev/null', os.O_RDONLY); os.openpty(); return Evidence(False, 'no')"
)
"""A probe that leaves open what any process may."""


def torch_in_no_time(site) -> None:
    """Install a package ``torch`` that probes can import at once: what they import is told by its name."""
    package = site.folder / "torch"
    package.mkdir()
    for name in ("__init__.py", "nn.py"):
        (package / name).touch()


REMARKS: dict[str, tuple[str, str]] = {
    "torch": (
        "import torch; return Evidence(False, 'no')",
        "imports torch, which takes seconds and may create a device context",
    ),
    "slow": ("import time; time.sleep(5.2); return Evidence(False, 'late')", "took 5."),
    "device": (
        "import os; os.open('/dev/full', os.O_WRONLY); return Evidence(False, 'no')",
        "leaves /dev/full open, as a device context does",
    ),
    "inside": ("machine.read(7); return Evidence(False, 'no')", "raised "),
}
"""By name, the body of a probe that answers, and what the doctor says of it."""


def test_probes_that_do_what_they_must_not(cli, site) -> None:
    """A probe that imports torch, is slow, keeps a device open or misuses a machine is told with its line."""
    torch_in_no_time(site)
    site.platform("harmless", probe=HARMLESS)
    for name, (body, _) in REMARKS.items():
        site.platform(name, probe=body)
    ended = cli("plugins", "doctor", "--json")
    told = [f"{row['message']} {row['location']}" for row in json.loads(ended.stdout)["findings"]]
    for name, (_, words) in REMARKS.items():
        place = f"{site.folder / f'{name}_device.py'}:"
        assert [row for row in told if words in row and place in row], (name, told)
    assert [row for row in told if "harmless" in row] == []


PLACES = {
    "an error": ("return machine.environ['ACME_NONE']", "acme_device.py:4"),
    "an error of a helper": ("import acme_platform; acme_platform.ask()", "acme_device.py:4"),
    "a wrong answer": ("return None", "acme_device.py:2"),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_line_of_a_probe_that_fails(site, name: str) -> None:
    """The finding has the line of the plugin's code, or that of the probe."""
    probe, place = PLACES[name]
    site.platform("acme", probe=f"{HEAD}{probe}", platform="def ask(): return 1 / 0\n")
    opgraft.reset()
    decide_platform(host_state().settings(), Machine())
    (finding,) = [each for each in PLATFORM_FINDINGS.get() if "left out" in each.message]
    assert finding.location == f"{site.folder / place}"


CLASSES = {
    "an error of the module": ("\n1 / 0\n", 2),
    "a class that is abstract": ("import opgraft\nclass Device(opgraft.Platform): pass\n", 2),
    "an instance": (
        "from opgraft.platforms.cpu.platform import CpuPlatform\nDevice = CpuPlatform()\n",
        1,
    ),
    "settings that raise": (
        "from opgraft.platforms.cpu.platform import CpuPlatform\nclass Device(CpuPlatform):\n"
        "    name = 'acme'\n    def default_config(self):\n        return {}[0]\n",
        5,
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_line_of_a_class_that_fails(site, name: str) -> None:
    """The finding has the line that raised, or that of the class or its module."""
    source, line = CLASSES[name]
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)
    assert opgraft.current_platform().name == "cpu"
    (finding,) = [each for each in PLATFORM_FINDINGS.get() if "left out" in each.message]
    assert finding.location == f"{site.folder / 'acme_platform.py'}:{line}"


def test_the_line_of_a_malformed_entry_point(site) -> None:
    """A name with a space is reported with the line of its file."""
    points = "[opgraft.plugins]\n\nacme norm = acme\n"
    site.install("acme", {"acme.py": ""}, points)
    (problem,) = discover().problems
    assert "the name 'acme norm' has other characters" in problem.reason
    assert problem.location == f"{site.folder / 'acme-1.0.dist-info/entry_points.txt'}:3"


BRIDGE = """
from pathlib import Path
from opgraft import Evidence, PlatformSpec

def platform(offer):
    with Path(__file__).with_name("made").open("a") as made:
        made.write(offer.name + "\\n")

    def probe(machine):
        module, _, name = offer.value.partition(":")
        return Evidence(False, getattr(__import__(module), name)())

    return PlatformSpec(probe, lambda: None)
"""
FOREIGN = """
import os, torch

def register():
    os.open("/dev/full", os.O_WRONLY)
    return "no device"
"""


def test_a_probe_behind_a_bridge(site) -> None:
    """A bridge is asked once, its plugin may import torch, and what the plugin leaves open has the plugin's line."""
    torch_in_no_time(site)
    site.install(
        "acme-bridge",
        {"acme_bridge.py": BRIDGE},
        {"opgraft.platform_bridges": ["acme.devices = acme_bridge:platform"]},
    )
    site.install("gizmo", {"gizmo.py": FOREIGN}, {"acme.devices": ["gizmo = gizmo:register"]})
    opgraft.reset()
    decide_platform(host_state().settings(), Machine())
    assert (site.folder / "made").read_text().split() == ["gizmo"]
    # On a busy machine another finding is about the time.
    (finding,) = [each for each in PLATFORM_FINDINGS.get() if "leaves" in each.message]
    assert "leaves /dev/full open" in finding.message
    assert finding.location == f"{site.folder / 'gizmo.py'}:4"


def test_a_probe_in_an_archive(site, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of an import is found in a plugin that lies in a zip file."""
    site.platform("packed", probe="import torch; return Evidence(False, 'no')")
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", site.folder)
    shutil.rmtree(site.folder)
    monkeypatch.syspath_prepend(archive)
    opgraft.reset()
    _, decision = decide_platform(host_state().settings(), Machine())
    (packed,) = (each for each in decision.candidates if each.name == "packed")
    assert packed.reason == "no"
    # On a busy machine another finding is about the time.
    (finding,) = [each for each in PLATFORM_FINDINGS.get() if "imports torch" in each.message]
    assert finding.location.startswith(f"{archive}/packed_device.py:")


LINES = '''"""A probe.

import torch is what this text says.
"""
def unused():
    import torch
from opgraft import Evidence, PlatformSpec
{above}
def probe(machine):
    __import__("torch")
    return Evidence(False, "no")
SPEC = PlatformSpec(probe, "acme_platform:Device")
'''


@pytest.mark.parametrize(("above", "line"), [("", 9), ("import torch.nn as nn", 8)])
def test_the_line_of_an_import(site, above: str, line: int) -> None:
    """The line is that of an import which has run, or else that of the probe."""
    torch_in_no_time(site)
    files = {"acme_device.py": LINES.format(above=above)}
    site.install("acme", files, {"opgraft.platforms": ["acme = acme_device:SPEC"]})
    opgraft.reset()
    decide_platform(host_state().settings(), Machine())
    found = PLATFORM_FINDINGS.get()  # on a busy machine one about the time, too
    places = [finding.location for finding in found if "imports torch" in finding.message]
    assert places == [f"{site.folder / 'acme_device.py'}:{line}"]


def test_device_files() -> None:
    """Consoles and message queues may be open in any process, and are no sign of a device."""
    consoles = ["/dev/ttyS0", "/dev/hvc0", "/dev/tty", "/dev/console", "/dev/mqueue/acme"]
    assert [path for path in consoles if is_device_file(path)] == []
    assert is_device_file("/dev/nvidia0")


def test_a_machine_of_a_folders_name(tmp_path) -> None:
    """The root of a machine may be given as text."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/name").write_text("acme")
    assert Machine(str(tmp_path), environ={}).read("/sys/name") == "acme"
