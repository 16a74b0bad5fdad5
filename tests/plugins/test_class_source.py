"""What ``opgraft detect`` tells of a platform's class without torch, and what a process then does."""

from __future__ import annotations

import importlib
import json
import textwrap

import pytest
from conftest import Cli, Site
from opgraft import current_platform
from opgraft.config import resolve
from opgraft.errors import PlatformError
from opgraft.machine.machine import Machine
from opgraft.plugins.class_source import look
from opgraft.plugins.discovery import PLATFORM_GROUP, discover
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.plugins.selection import decide_without_torch

pytestmark = pytest.mark.usefixtures("warm_children")

AVAILABLE = "return Evidence(True, 'here')"
GOOD = "from opgraft.platforms.cpu.platform import CpuPlatform\n"
OWN = "import opgraft\nfrom abc import abstractmethod\n"
FIRST = (
    f"{GOOD}class Device(CpuPlatform):\n    name = 'acne'\nclass Other(CpuPlatform):\n"
    "    name = 'acme'\n"
)
"""A platform under another name, and one under its own, which comes to stand in its place."""
ACNE = f"{GOOD}class Device(CpuPlatform):\n    name = 'acne'\n"
"""A platform under another name, which code after it may mend."""
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
    "a star that is imported before": (
        f"from math import *\n{GOOD}class Device(CpuPlatform):\n    name = 'acne'\n",
        "it calls itself 'acne'",
    ),
    "the same import twice": (
        f"try:\n    {GOOD}except ImportError:\n    {GOOD}class Device(CpuPlatform):\n    name = 'acne'\n",
        "it calls itself 'acne'",
    ),
    "unknown key": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    dispatch_chain = ('npu',)\n",
        "its dispatch chain has 'npu'",
    ),
    "a key twice": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    dispatch_chain = ('cpu', 'cpu')\n",
        "its dispatch chain has 'cpu' twice",
    ),
    "keys in a text": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    dispatch_chain = 'cpu'\n",
        "its dispatch_chain is a str, expected a tuple of strings",
    ),
    "no type of device": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    device_type = None\n",
        "its device_type is None",
    ),
    "a device without numbers": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    @property\n"
        "    def device_type(self):\n        return 'meta'\n",
        "its device_type is 'meta'",
    ),
    "a property that is a method": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    def device_type(self):\n"
        "        return 'cpu'\n",
        "its device_type is a method: write @property above it",
    ),
    "no Python": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n    def memory(:\n",
        "acme_platform.py:4 is no Python: SyntaxError",
    ),
    "a package that is not there": (
        f"{GOOD}import json\nfrom acme_missing.parts import thing\n"
        "class Device(CpuPlatform):\n    name = 'acme'\n",
        "acme_platform.py:3 imports acme_missing, which is not installed",
    ),
    "an import that raises": (
        f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\nraise ImportError('no driver')\n",
        "acme_platform.py:4 raises as the module is imported",
    ),
    "an encoding that nobody knows": ("# -*- coding: klingon -*-\n", "is no Python: SyntaxError"),
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
    "a library that may be missing": f"{GOOD}try:\n    import acme_runtime\nexcept ImportError:\n    pass\n"
    "class Device(CpuPlatform):\n    name = 'acme'\n",
    "a library that another import makes": f"{GOOD}import acme_kernels\nimport acme_made_there\n"
    "class Device(CpuPlatform):\n    name = 'acme'\n",
    "a library that the module makes": f"import sys, types\nsys.modules['acme_made'] = types.ModuleType('a')\n"
    f"import acme_made\n{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n",
    "methods under a condition": f"{GOOD}class Device(CpuPlatform):\n    if True:\n        name = 'acme'\n",
}

UNKNOWABLE = {
    "imported twice": f"{GOOD}try:\n    from acme_missing import Base\nexcept ImportError:\n"
    "    from acme_kernels import Device as Base\ntry:\n    pass\nexcept ImportError:\n"
    "    from acme_faults import Device as Base\nclass Device(Base):\n    pass\n",
    "imported or defined": f"{GOOD}class Device(CpuPlatform):\n    name = 'acme'\n"
    "if False:\n    from acme_faults import Device\n",
    "imported in if and else": "if True:\n    from acme_kernels import Device\n"
    "else:\n    from acme_faults import Device\n",
    "a module that is imported twice": "import acme_kernels as kernels\n"
    "if False:\n    import acme_faults as kernels\nclass Device(kernels.Device):\n    pass\n",
    "in a match block": f"{GOOD}match 1:\n    case 1:\n"
    "        class Device(CpuPlatform):\n            name = 'acme'\n",
    "in one of two match blocks": "match 1:\n    case 1:\n        from acme_kernels import Device\n"
    "    case _:\n        from acme_faults import Device\n",
    "captured by a match": f"{FIRST}match Other:\n    case Device:\n        pass\n",
    "bound by a walrus": f"{FIRST}print((Device := Other), end='')\n",
    "bound by with": f"{FIRST}import contextlib\nwith contextlib.nullcontext(Other) as Device:\n    pass\n",
    "bound by a function": f"{FIRST}def bind():\n    global Device\n    Device = Other\nbind()\n",
    "bound by a later star": f"{FIRST}from acme_kernels import *\n",
    "a star and a condition": f"{GOOD}from acme_kernels import *\nif False:\n"
    "    class Device(CpuPlatform):\n        name = 'acne'\n",
    "bound by globals later": f"{FIRST}globals()['Device'] = Other\n",
    "renamed later": f"{FIRST}Device.name = 'acme'\n",
    "changed by a call": f"def named(cls):\n    cls.name = 'acme'\n{FIRST}named(Device)\n",
    "imported members": f"{OWN}class Device(opgraft.Platform):\n{MEMBERS}"
    "    from acme_members import device_count, capability, memory, synchronize, manual_seed\n",
    "an imported name": f"{GOOD}class Device(CpuPlatform):\n    from acme_members import name\n",
    "a name that __init__ sets": f"{OWN}class Device(opgraft.Platform):\n{MEMBERS}{METHODS}    name = 'acne'\n"
    "    def __init__(self):\n        self.name = 'acme'\n",
    "a name by __setattr__": f"{ACNE}    def __init__(self):\n        object.__setattr__(self, 'name', 'acme')\n",
    "a name by super": f"{ACNE}    def __init__(self):\n        super().__setattr__('name', 'acme')\n",
    "a name by a helper": f"{ACNE}    def __init__(self):\n        fix(self)\ndef fix(it):\n    it.name = 'acme'\n",
    "a name by an imported helper": f"from acme_members import fix\n{ACNE}    def __init__(self):\n        fix(self)\n",
    "a name by __getattribute__": f"{ACNE}    def __getattribute__(self, name):\n"
    "        return 'acme' if name == 'name' else super().__getattribute__(name)\n",
    "another object": f"{FIRST}class Device(CpuPlatform):\n    name = 'acne'\n"
    "    def __new__(cls):\n        return object.__new__(Other)\n",
    "a name that another class sets": f"class Named:\n    def __set_name__(self, owner, name):\n"
    f"        type.__setattr__(owner, 'name', 'acme')\n{ACNE}    named = Named()\n",
    "renamed by a later import": f"{ACNE}import acme_late\n",
    "renamed by a later import under a condition": f"{ACNE}if True:\n    import acme_late\n",
    "renamed in a loop": f"{ACNE}for each in [Device]:\n    each.name = 'acme'\n",
    "renamed by an alias": f"{ACNE}D = Device\nD.name = 'acme'\n",
    "changed by a call, by an alias": f"from acme_members import fix\n{ACNE}D = Device\nfix(D)\n",
    "renamed by a function": f"{ACNE}def fix():\n    D = Device\n    D.name = 'acme'\nfix()\n",
    "renamed in a list": f"from acme_members import fix\n{ACNE}[fix(each) for each in map(type, [Device()])]\n",
    "renamed by a class method": f"{GOOD}class Base(CpuPlatform):\n    name = 'acne'\n    @classmethod\n"
    "    def fix(cls):\n        type.__setattr__(cls, 'name', 'acme')\nclass Device(Base):\n    pass\nDevice.fix()\n",
    "methods that come later": f"{OWN}import abc\nclass Device(opgraft.Platform):\n{MEMBERS}D = Device\n"
    "for each in Device.__abstractmethods__:\n    type.__setattr__(D, each, print)\nabc.update_abstractmethods(D)\n",
    "a name in two steps": f"{GOOD}class Device(CpuPlatform):\n    name = 'ac'\n    name += 'me'\n",
    "a name by a decorator": f"{GOOD}def named(method):\n    return 'acme'\n"
    "class Device(CpuPlatform):\n    @named\n    def name(self):\n        return 'acne'\n",
    "a name of a match block": f"{GOOD}class Device(CpuPlatform):\n    match 1:\n"
    "        case 1:\n            name = 'acme'\n",
    "several names at once": f"{GOOD}class Device(CpuPlatform):\n"
    "    name, dispatch_chain = ('acme', ('cpu', 'native'))\n",
    "named by a base": f"{GOOD}class Base(CpuPlatform):\n    def __init_subclass__(cls):\n        cls.name = 'acme'\n"
    "class Device(Base):\n    pass\n",
}
"""Classes that are fine, of which the source alone shows less, or the wrong thing at first sight."""


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
    (finding,) = PLATFORM_FINDINGS.get()
    assert words in finding.message
    assert current_platform().name == "cpu"


@pytest.mark.parametrize("form", FINE)
def test_a_class_that_may_be_fine(site: Site, form: str) -> None:
    """It is chosen, however it is written, and the rest is said to be not verified."""
    site.platform("acme", probe=AVAILABLE, platform=FINE[form])
    makes = "import sys, types\nsys.modules['acme_made_there'] = types.ModuleType('a')\n"
    (site.folder / "acme_kernels.py").write_text(makes + FINE["derived"])
    chosen, unknown = detected()
    assert (chosen, "settings" in unknown) == ("acme", True)
    assert current_platform().name == "acme"


@pytest.mark.parametrize("form", UNKNOWABLE)
def test_a_class_that_its_source_does_not_show(site: Site, form: str) -> None:
    """No fault is found: running the source makes a platform that can be used."""
    site.platform("acme", probe=AVAILABLE, platform=UNKNOWABLE[form])
    (site.folder / "acme_kernels.py").write_text(FINE["derived"])
    (site.folder / "acme_faults.py").write_text(FAULTS["no base"][0])
    (site.folder / "acme_late.py").write_text(
        "import sys\nsys.modules['acme_platform'].Device.name = 'acme'\n"
    )
    (site.folder / "acme_members.py").write_text(
        f"name = 'acme'\ndef fix(it):\n    it.name = 'acme'\n{textwrap.dedent(METHODS)}"
    )
    (offer,) = [each for each in discover().of_group(PLATFORM_GROUP) if each.name == "acme"]
    found = look(offer)
    assert (found.fault, "settings" in found.unknown) == (None, True)
    assert importlib.import_module("acme_platform").Device().name == "acme"


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
        == "the import of its module, its constructor and its settings"
    )
    told = cli("detect").stdout
    assert "platform: acme" in told
    told = " ".join(told.split())
    not_verified = "the import of its module, its constructor and its settings"
    assert f"not verified, as detect imports no torch: {not_verified};" in told
