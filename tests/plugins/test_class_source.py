"""What ``opgraft detect`` tells of a platform's class without torch, and what a process then does."""

from __future__ import annotations

import json

import pytest
from conftest import Cli, Site
from opgraft import current_platform
from opgraft.config import resolve
from opgraft.errors import PlatformError
from opgraft.machine.machine import Machine
from opgraft.plugins.selection import decide_without_torch
from opgraft.state import host_state

AVAILABLE = "return Evidence(True, 'here')"
GOOD = "from opgraft.platforms.cpu.platform import CpuPlatform\n"
OWN = "import opgraft\nfrom abc import abstractmethod\n"
MEMBERS = "    name = 'acme'\n    device_type = 'cpu'\n    dispatch_chain = ('cpu', 'native')\n"
METHODS = "".join(
    f"    def {each}(self, *_): ...\n"
    for each in ("device_count", "capability", "memory", "synchronize", "manual_seed")
)

FAULTS = {
    "abstract": (
        f"{OWN}class Device(opgraft.Platform):\n{MEMBERS}",
        "it does not define capability, device_count, manual_seed, memory, synchronize",
    ),
    "abstract above": (
        f"{OWN}class Base(opgraft.Platform):\n{MEMBERS}{METHODS}    @abstractmethod\n"
        "    def memory(self): ...\nclass Device(Base):\n    pass\n",
        "it does not define memory",
    ),
    "misspelt class": (f"{GOOD}class Devise(CpuPlatform):\n    name = 'acme'\n", "has no class 'Device'"),
    "other base": ("class Device(dict):\n    name = 'acme'\n", "does not derive from opgraft.Platform"),
    "no base": ("class Device:\n    name = 'acme'\n", "does not derive from opgraft.Platform"),
    "other name": (f"{GOOD}class Device(CpuPlatform):\n    name = 'acne'\n", "it calls itself 'acne'"),
    "name of a property": (
        f"{GOOD}class Device(CpuPlatform):\n    @property\n    def name(self):\n        return 'acne'\n",
        "it calls itself 'acne'",
    ),
    "inherited name": (f"{GOOD}class Device(CpuPlatform):\n    pass\n", "it calls itself 'cpu'"),
    "unknown key": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    dispatch_chain = ('npu',)\n",
        "its dispatch chain has 'npu'",
    ),
}  # fmt: skip

FINE = {
    "derived": f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n",
    "own": f"{OWN}class Device(opgraft.Platform):\n{MEMBERS}{METHODS}",
    "in two steps": f"{OWN}from opgraft.platform import Platform as P\nclass Base(P):\n{METHODS}\n"
    f"class Device(Base):\n{MEMBERS}",
    "under a condition": f"{GOOD}if True:\n    class Device(CpuPlatform):\n        name = 'acme'\n"
    "else:\n    class Device:\n        pass\n",
    "made by a call": f"{GOOD}Device = type('Device', (CpuPlatform,), {{'name': 'acme'}})\n",
    "by another name": f"{GOOD}class _Device(CpuPlatform):\n    name = 'acme'\nDevice = _Device\n",
    "from another module": "from acme_kernels import Device\n",
    "by a star": "from acme_kernels import *\n",
    "by globals": f"{GOOD}globals()['Device'] = type('Device', (CpuPlatform,), {{'name': 'acme'}})\n",
    "with a mixin": f"{GOOD}class Mixin:\n    name = 'acme'\nclass Device(Mixin, CpuPlatform):\n    pass\n",
    "decorated": f"{GOOD}def named(cls):\n    cls.name = 'acme'\n    return cls\n"
    "@named\nclass Device(CpuPlatform):\n    pass\n",
    "methods under a condition": f"{GOOD}class Device(CpuPlatform):\n    if True:\n        name = 'acme'\n",
}


def detected() -> tuple[str | None, str]:
    """What detection chooses, and what it leaves open."""
    decision, unknown = decide_without_torch(resolve([]), Machine())
    return decision.chosen, unknown


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_the_source_shows(site: Site, fault: str) -> None:
    """Detection leaves the platform out, as a process does that loads it."""
    source, words = FAULTS[fault]
    site.platform("acme", probe=AVAILABLE, platform=source)
    assert detected() == ("cpu", "")
    (finding,) = host_state().platform_findings
    assert words in finding.message
    assert current_platform().name == "cpu"


@pytest.mark.parametrize("form", FINE)
def test_a_class_that_may_be_fine(site: Site, form: str) -> None:
    """It is chosen, however it is written, and the rest is said to be not verified."""
    site.platform("acme", probe=AVAILABLE, platform=FINE[form])
    (site.folder / "acme_kernels.py").write_text(FINE["derived"])
    chosen, unknown = detected()
    assert (chosen, "settings" in unknown) == ("acme", True)
    assert current_platform().name == "acme"


def test_a_misspelt_path(site: Site) -> None:
    """The module, or the form of the path, may be wrong too."""
    source = (
        "from opgraft import Evidence, PlatformSpec\ndef probe(machine):\n    return Evidence(True, 'here')\n"
        "SPEC = PlatformSpec(probe, '{}')\n"
    )
    paths = {"one": "acme_plattform:Device", "two": "json.nothing:Device", "three": "json.Device"}
    points = [f"{name} = acme_{name}:SPEC" for name in paths]
    files = {f"acme_{name}.py": source.format(path) for name, path in paths.items()}
    site.install("acme-dist", files, {"opgraft.platforms": points})
    for name, path in paths.items():
        settings = resolve([])
        found = {"one": "no module", "two": "no module", "three": "expected 'package.module:Class'"}
        with pytest.raises(PlatformError, match=found[name]) as error:
            decide_without_torch(_asking(settings, name), Machine())
        assert path in str(error.value)


def _asking(settings, name: str):
    from opgraft import OpgraftConfig

    return resolve([("a test", OpgraftConfig(platform=name))])


def test_the_command_says_what_is_not_verified(site: Site, cli: Cli) -> None:
    """Settings that raise need torch: detection says so, in text and in JSON."""
    raises = FINE["derived"] + "    def default_config(self):\n        raise ValueError('no')\n"
    site.platform("acme", probe=AVAILABLE, platform=raises)
    assert (
        json.loads(cli("detect", "--json").stdout)["not_verified"]
        == "its constructor and its settings"
    )
    told = cli("detect").stdout
    assert "platform: acme" in told
    assert "not verified, as that needs torch: its constructor and its settings" in told
