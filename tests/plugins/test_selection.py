"""Deciding on a platform: settings, probes, and probes that misbehave."""

from __future__ import annotations

import logging
import os
import resource
import time
from pathlib import Path

import opgraft
import pytest
from opgraft import OpgraftConfig, current_platform, set_config
from opgraft.errors import PlatformConflictError, PlatformError
from opgraft.machine.machine import Machine
from opgraft.platforms.cpu.probe import probe
from opgraft.plugins import probing
from opgraft.plugins.discovery import PLATFORM_GROUP, discover
from opgraft.plugins.probing import ProbeFailed, ask
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.plugins.selection import selected_platform
from opgraft.serving.engine_settings import engine_config

AVAILABLE = "return Evidence(True, 'a device was found')"
ABSENT = "return Evidence(False, 'no device')"


def rows() -> dict[str, tuple[bool, str]]:
    """The candidates of the decision: name to accepted and reason."""
    return {c.name: (c.accepted, c.reason) for c in selected_platform().decision.candidates}


def test_the_cpu_is_the_last_resort() -> None:
    """Without plugins the decision is the CPU, and is made once."""
    assert current_platform().name == "cpu"
    assert current_platform() is current_platform()


def test_an_available_out_of_tree_platform_comes_first(site) -> None:
    """An installed device that its probe finds is chosen over the built-in platforms."""
    site.platform("acme", probe=AVAILABLE)
    assert current_platform().name == "acme"
    assert rows()["cpu"] == (False, "every machine has a CPU, but acme comes first")


def test_an_absent_device_leaves_the_cpu(site) -> None:
    """A probe that finds nothing rejects its platform with its own reason."""
    site.platform("acme", probe=ABSENT)
    assert current_platform().name == "cpu"
    assert rows()["acme"] == (False, "no device")


def test_two_available_out_of_tree_platforms_are_an_error(site) -> None:
    """The error names both and the setting; with the setting the named one is used."""
    site.platform("acme", probe=AVAILABLE)
    site.platform("brix", probe=AVAILABLE)
    with pytest.raises(
        PlatformConflictError, match=r"acme .*acme-dist.* and brix .*OPGRAFT_PLATFORM"
    ) as caught:
        current_platform()
    assert caught.value.exit_code == 3
    with set_config(OpgraftConfig(platform="brix")):
        assert current_platform().name == "brix"
        assert rows()["acme"][1] == "not probed: platform 'brix' was asked for"


@pytest.mark.parametrize("whole", [True, False], ids=["config", "argument"])
def test_the_platform_of_an_engine_settles_a_choice(site, whole: bool) -> None:
    """It is the process's from then on."""
    for name in ("acme", "brix"):
        site.platform(name, probe="return Evidence(True, '1 device')")

    def settings_for(platform: str) -> OpgraftConfig:
        if whole:
            return engine_config("smollm2", OpgraftConfig(platform=platform), {})
        return engine_config("smollm2", None, {"platform": platform})

    assert settings_for("brix").platform == "brix"
    assert opgraft.current_platform().name == "brix"
    with pytest.raises(
        PlatformError, match=r"of LLM asks for platform 'acme'.*already uses 'brix'"
    ):
        settings_for("acme")


def test_a_platform_that_nobody_offers(monkeypatch) -> None:
    """The error names the variable, the near match and what to do."""
    monkeypatch.setenv("OPGRAFT_PLATFORM", "cpuu")
    opgraft.reset()
    with pytest.raises(
        PlatformError, match=r"OPGRAFT_PLATFORM asks for platform 'cpuu'.*did you mean 'cpu'"
    ) as caught:
        current_platform()
    assert caught.value.exit_code == 3


def test_a_platform_asked_for_that_is_not_available(site, monkeypatch) -> None:
    """An explicit wish is never answered by another platform."""
    site.platform("acme", probe=ABSENT)
    monkeypatch.setenv("OPGRAFT_PLATFORM", "acme")
    opgraft.reset()
    with pytest.raises(
        PlatformError, match=r"'acme' \(acme-dist 1.0\), which cannot be used here: no device"
    ):
        current_platform()


def test_the_platform_is_decided_once(site) -> None:
    """A scope that asks for another platform than the process uses is an error, not a mixture."""
    site.platform("acme", probe=AVAILABLE)
    current_platform()
    with (
        set_config(OpgraftConfig(platform="cpu")),
        pytest.raises(PlatformError, match="already uses 'acme'"),
    ):
        current_platform()
    opgraft.reset()
    with set_config(OpgraftConfig(platform="cpu")):
        assert current_platform().name == "cpu"


@pytest.mark.parametrize(
    ("variable", "value"), [("OPGRAFT_PLUGINS", ""), ("OPGRAFT_PLUGINS_DISABLE", "acme-dist")]
)
def test_allow_and_deny_lists_hold_for_platforms(
    site, monkeypatch, variable: str, value: str
) -> None:
    """A platform of a plugin that the settings exclude is not even probed."""
    site.platform("acme", probe=AVAILABLE)
    monkeypatch.setenv(variable, value)
    opgraft.reset()
    assert current_platform().name == "cpu"
    assert variable in rows()["acme"][1]


BAD_PROBES = {
    "raises": ("raise OSError('bus error')", "raised OSError"),
    "exits": ("raise SystemExit(3)", "raised SystemExit"),
    "crashes": ("import os; os.abort()", "ended with status -6"),
    "gives devices of wrong types": (
        "import opgraft; return Evidence(True, 'found', (opgraft.Device('A', memory='64 GiB'),))",
        "no integer",
    ),
    "gives strange devices": ("return Evidence(True, 'found', ('A',))", "takes opgraft.Device"),
    "leaves early": ("import os; os._exit(0)", "its process ended with status 0"),
    "answers nonsense": ("return True", "returned a bool, expected opgraft.Evidence"),
}


@pytest.mark.parametrize("kind", BAD_PROBES)
def test_a_bad_probe_is_recorded_reported_and_survived(site, caplog, kind: str) -> None:
    """Whatever a third party's probe does, this process goes on, and says loudly what happened."""
    body, reason = BAD_PROBES[kind]
    site.platform("acme", probe=body)
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        assert current_platform().name == "cpu"
    assert reason in rows()["acme"][1]
    assert len([record for record in caplog.records if "acme" in record.message]) == 1


def test_a_probe_module_that_asks_for_the_platform_starts_no_children_without_end(site) -> None:
    """Code that uses the platform when it is imported would start a probe within the probe; it gets an error."""
    site.platform("acme", probe=AVAILABLE)
    file = site.folder / "acme_device.py"
    file.write_text("import opgraft\nopgraft.current_platform()\n" + file.read_text())
    assert current_platform().name == "cpu"
    assert "probed from within another platform's probe" in rows()["acme"][1]


def test_what_a_probe_prints_does_no_harm(site) -> None:
    """Evidence is not taken from the standard output that the probe writes to."""
    site.platform("acme", probe="print('{}'); return Evidence(True, 'found')")
    assert current_platform().name == "acme"


def test_a_probe_that_hangs_is_stopped(site) -> None:
    """The child process has a time limit."""
    site.platform("acme", probe="import time; time.sleep(60)")
    (offer,) = (offer for offer in discover().of_group(PLATFORM_GROUP) if offer.name == "acme")
    with pytest.raises(ProbeFailed, match=r"no answer within 0\.5 s"):
        ask(offer, Machine(), time_limit=0.5)


def test_what_a_probe_starts_does_not_hold_detection_up(site) -> None:
    """A process that the probe leaves behind keeps its pipes open; the answer counts all the same."""
    leave = "import subprocess; subprocess.Popen(['sleep', '30'], start_new_session=True); "
    site.platform("acme", probe=leave + AVAILABLE)
    began = time.monotonic()
    assert current_platform().name == "acme"
    assert time.monotonic() - began < 20


def test_the_remedy_is_part_of_the_error(site) -> None:
    """Who asks for a platform that cannot be used is told how to use it."""
    site.platform("acme", probe="return Evidence(False, 'no driver', remedy='install acme-driver')")
    with (
        set_config(OpgraftConfig(platform="acme")),
        pytest.raises(PlatformError, match="To use it: install acme-driver"),
    ):
        current_platform()


def test_strict_mode_raises_for_a_bad_probe(site, monkeypatch) -> None:
    """With OPGRAFT_STRICT a probe that fails is an error."""
    site.platform("acme", probe="raise OSError('bus error')")
    monkeypatch.setenv("OPGRAFT_STRICT", "1")
    opgraft.reset()
    with pytest.raises(PlatformError, match=r"strict mode: platform acme .*bus error"):
        current_platform()


def test_a_spec_of_the_wrong_type(site) -> None:
    """An entry point that names something else than a PlatformSpec is rejected with its type."""
    site.install("acme-dist", {"acme.py": "SPEC = 3"}, {"opgraft.platforms": ["acme = acme:SPEC"]})
    assert current_platform().name == "cpu"
    assert "is a int, expected an opgraft.PlatformSpec" in rows()["acme"][1]


UNCALLABLE = {
    "a function in the place of a spec": "def SPEC(): pass\n",
    "a probe without a parameter": (
        "def probe(): pass\nimport opgraft\nSPEC = opgraft.PlatformSpec(probe, 'acme:Acme')\n"
    ),
}
"""Sources of platforms whose function on the first line cannot be called as a probe."""


@pytest.mark.parametrize("kind", UNCALLABLE)
def test_the_line_of_an_uncallable_probe(site, kind: str) -> None:
    """The function is named by its own line, not by the line in opgraft that would call it."""
    entry = {"opgraft.platforms": ["acme = acme:SPEC"]}
    site.install("acme-dist", {"acme.py": UNCALLABLE[kind]}, entry)
    (offer,) = (offer for offer in discover().of_group(PLATFORM_GROUP) if offer.name == "acme")
    with pytest.raises(ProbeFailed) as raised:
        ask(offer, Machine(), time_limit=60)
    assert raised.value.location == f"{site.folder / 'acme.py'}:1"


BAD_CLASSES = {
    "import fails": ("raise ImportError('no driver library')", "no driver library"),
    "exits": ("raise SystemExit(1)", "SystemExit"),
    "no platform": ("class Device: pass", "expected an opgraft.Platform"),
    "another name": (
        "from opgraft.platforms.cpu.platform import CpuPlatform\nclass Device(CpuPlatform):\n    name = 'other'",
        "calls itself 'other'",
    ),
    "bad defaults": (
        "from opgraft.platforms.cpu.platform import CpuPlatform\nclass Device(CpuPlatform):\n    name = 'acme'\n"
        "    def default_config(self): return None",
        "default_config returned a NoneType",
    ),
    "abstract": ("from opgraft import Platform\nclass Device(Platform): pass", "abstract"),
}


@pytest.mark.parametrize("kind", BAD_CLASSES)
def test_a_platform_class_that_cannot_be_used(site, caplog, kind: str) -> None:
    """A detected platform whose class fails is left out loudly; asked for by name it is an error."""
    source, reason = BAD_CLASSES[kind]
    site.platform("acme", probe=AVAILABLE, platform=source)
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        assert current_platform().name == "cpu"
    assert reason in rows()["acme"][1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    opgraft.reset()
    with set_config(OpgraftConfig(platform="acme")), pytest.raises(PlatformError, match=reason):
        current_platform()


def test_a_platforms_defaults_are_the_lowest_layer(site, monkeypatch) -> None:
    """default_config of the selected platform holds unless a higher layer says otherwise."""
    source = (
        "from opgraft import CompilationConfig, OpgraftConfig\n"
        "from opgraft.platforms.cpu.platform import CpuPlatform\n"
        "class Device(CpuPlatform):\n    name = 'acme'\n"
        "    def default_config(self):\n"
        "        return OpgraftConfig(compilation_config=CompilationConfig(custom_ops=['none']))\n"
    )
    site.platform("acme", probe=AVAILABLE, platform=source)
    current_platform()
    enabled, reason = opgraft.registry.state.host_state().settings().enabled("x")
    assert (enabled, "platform acme" in reason) == (False, True)


class TestCpuProbe:
    """The CPU's probe reads files below the machine's root."""

    def test_x86_flags_and_memory(self, tmp_path: Path) -> None:
        """Model, instruction sets and memory come from /proc."""
        (tmp_path / "proc").mkdir()
        text = "processor\t: 0\nmodel name\t: Example CPU\nflags\t\t: fpu avx2 avx512f amx_tile\n\nprocessor\t: 1\n"
        (tmp_path / "proc/cpuinfo").write_text(text)
        (tmp_path / "proc/meminfo").write_text("MemTotal:       16384 kB\n")
        (device,) = probe(Machine(tmp_path, {})).devices
        assert (device.name, device.capability, device.memory) == (
            "Example CPU",
            "avx2 avx512f amx_tile",
            16384 * 1024,
        )

    def test_arm_features(self, tmp_path: Path) -> None:
        """Arm spells its instruction sets under Features and gives no model name."""
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd sve i8mm\n")
        (device,) = probe(Machine(tmp_path, {})).devices
        assert (device.name, device.capability) == ("CPU", "asimd sve i8mm")

    @pytest.mark.parametrize("digits", ["9" * 5000, "9" * 400])
    def test_huge_numbers(self, tmp_path: Path, digits: str) -> None:
        """More digits than any memory has are no number."""
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text("processor: 0\nmodel name\t: \nstepping\t: 3\n")
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {digits} kB\n")
        (device,) = probe(Machine(tmp_path, {})).devices
        assert (device.name, device.memory) == ("CPU", None)

    @pytest.mark.parametrize("content", [None, b"", b"\xff\xfe garbage", b"x" * (3 << 20)])
    def test_it_never_raises(self, tmp_path: Path, content: bytes | None) -> None:
        """Missing, empty, undecodable and huge files leave the CPU available."""
        if content is not None:
            (tmp_path / "proc").mkdir()
            (tmp_path / "proc/cpuinfo").write_bytes(content)
        assert probe(Machine(tmp_path, {})).available


def test_the_cpu_platform_is_complete() -> None:
    """Every member of the contract answers on the CPU."""
    platform = current_platform()
    platform.manual_seed(0)
    platform.synchronize()
    assert platform.device_type == "cpu"
    assert platform.device_count() == 1
    assert platform.capability().dtypes
    assert platform.memory().total >= platform.memory().free > 0
    assert (platform.distributed_backend, platform.compile_backend) == ("gloo", "inductor")
    assert platform.visibility_variable is None


def test_an_entry_point_that_names_what_is_not_there(site) -> None:
    """The entry point is at fault: its name and value are told, with close matches."""
    files = {"brix_device.py": "SPEC = None\n"}
    site.install("brix", files, {"opgraft.platforms": ["brix = brix_device:SPECC"]})
    opgraft.current_platform()
    (finding,) = PLATFORM_FINDINGS.get()
    assert (
        "the entry point brix = brix_device:SPECC in opgraft.platforms names 'SPECC'"
        in finding.message
    )
    assert "did you mean 'SPEC'?" in finding.message
    assert "importlib_metadata" not in finding.message


def test_probes_run_at_the_same_time(site) -> None:
    """The slowest probe is the limit, and every candidate stands in its place with its own reason."""
    names = [f"acme{number}" for number in range(6)]
    for name in names:
        site.platform(name, probe=f"import time; time.sleep(3); return Evidence(False, '{name}')")
    began = time.monotonic()
    found = rows()
    assert time.monotonic() - began < 12  # one after another they would take more than 18 s
    assert [name for name in found if name in names] == names
    assert [found[name] for name in names] == [(False, name) for name in names]


def test_many_probes_that_hang(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes share one time limit: one that begins late has a part of the limit."""
    monkeypatch.setattr(probing, "TIME_LIMIT", 2.0)
    monkeypatch.setattr(probing, "LEAST_TIME", 0.1)
    monkeypatch.setattr(probing, "_AT_ONCE", 2)
    names = [f"acme{number}" for number in range(6)]
    for name in names:
        site.platform(name, probe="import time; time.sleep(60)")
    began = time.monotonic()
    found = rows()
    assert time.monotonic() - began < 5  # three at 2 s each would take more than 6 s
    assert not any(found[name][0] for name in names)
    assert all("gave no answer within" in found[name][1] for name in names), found


def test_a_probe_behind_one_that_hangs(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, or is left out this time only: the quarantine is for the first one."""
    monkeypatch.setattr(probing, "TIME_LIMIT", 3.0)
    monkeypatch.setattr(probing, "LEAST_TIME", 0.1)
    monkeypatch.setattr(probing, "_AT_ONCE", 1)
    for name in ("acme1", "acme2"):
        site.platform(name, probe="import time; time.sleep(60)")
    found = rows()
    assert "it began late, behind other probes" not in found["acme1"][1]
    # On a busy machine, the second probe may also lack a processor, which is told instead.
    late = "it began late, behind other probes", "this machine is too busy"
    assert any(reason in found["acme2"][1] for reason in late)
    monkeypatch.setattr(probing, "TIME_LIMIT", 60.0)
    (site.folder / "acme2_device.py").write_text(
        "from opgraft import Evidence, PlatformSpec\n"
        "def probe(machine):\n    return Evidence(False, 'not here')\n"
        "SPEC = PlatformSpec(probe, 'acme2_platform:Device')\n"
    )
    opgraft.reset()
    assert rows()["acme2"][1] == "not here"


def test_probes_with_few_files(site) -> None:
    """As many probes run at the same time as this process may open files for; none fails for another one."""
    for number in range(4):
        site.platform(f"acme{number}", probe=ABSENT)
    opened = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 14, hard))
    try:
        found = rows()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {found[f"acme{number}"] for number in range(4)} == {(False, "no device")}
