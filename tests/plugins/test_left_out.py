"""Platforms and plugins that are left out, at every step at which they can be: nothing of them stays declared."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import opgraft
import pytest
import torch
from conftest import Site
from opgraft import CustomOp, OpgraftConfig, current_platform, load_plugins, set_config
from opgraft.binding import torch_library
from opgraft.binding.functional import FUNCTIONALS, unregister
from opgraft.ops import RMSNorm, SiluAndMul
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from opgraft.registry.state import host_state
from support.vllm_plugin import OPS, PLATFORM, imports_forgotten, install_acme, install_bridge

pytestmark = pytest.mark.usefixtures("warm_children")

DECLARES = """
import os
import opgraft
from opgraft import CustomOp, OpgraftConfig, PluggableClass, register_functional
from opgraft.ops import RMSNorm
from opgraft.platforms.cpu.platform import CpuPlatform

@RMSNorm.register_oot
class AcmeNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x * 0

@CustomOp.register("acme_op")
class AcmeOp(CustomOp):
    def forward_native(self, x):
        return x

@PluggableClass.register("acme_class")
class AcmeClass(PluggableClass):
    pass

@register_functional("acme_op", fake=lambda x: x.clone())
def acme_form(x: "torch.Tensor") -> "torch.Tensor":
    return x.clone()

def acme_fast(x: "torch.Tensor") -> "torch.Tensor":
    return x.clone()

opgraft.direct_register_custom_op("acme_fast", acme_fast)
library = torch.library.Library("acme_left_out", "FRAGMENT")
opgraft.direct_register_custom_op("acme_own", acme_fast, target_lib=library)
""".replace('"torch.Tensor"', "torch.Tensor").replace("import os\n", "import os\nimport torch\n")

DEVICE = """
class Device(CpuPlatform):
    name = "acme"
"""

PLATFORM_FAULTS = {
    "its module raises": DEVICE + "raise OSError('no driver')\n",
    "its module ends the process": DEVICE + "raise SystemExit(3)\n",
    "its class is missing": DEVICE.replace("Device", "Devise"),
    "it is no platform": DEVICE + "Device = dict\n",
    "its class is no class": DEVICE + "Device = None\n",
    "it is abstract": "class Device(opgraft.Platform):\n    name = 'acme'\n",
    "its constructor raises": DEVICE + "    def __init__(self):\n        raise OSError('busy')\n",
    "it has another name": DEVICE.replace('"acme"', '"acne"'),
    "its name raises": DEVICE
    + "    @property\n    def name(self):\n        raise OSError('busy')\n",
    "its chain has an unknown key": DEVICE + "    dispatch_chain = ('acme', 'native')\n",
    "its chain raises": DEVICE + "    @property\n    def dispatch_chain(self):\n        1 / 0\n",
    "its settings raise": DEVICE
    + "    def default_config(self):\n        raise ValueError('no')\n",
    "its settings are none": DEVICE + "    def default_config(self):\n        return {}\n",
    "it sets what a platform must not": DEVICE
    + "    def default_config(self):\n        return OpgraftConfig(platform='cpu')\n",
    "its module constructs an op": f"RMSNorm(4)\n{DEVICE}",
    "its module asks for the platform": f"opgraft.current_platform()\n{DEVICE}",
    "its settings ask for the platform": DEVICE
    + "    def default_config(self):\n        opgraft.current_platform()\n",
}


def declared() -> dict[str, bool]:
    """Tell which of the things that ``DECLARES`` declares are in effect."""
    registry = host_state().registry
    return {
        "replacement": RMSNorm(4).decision.chosen == "AcmeNorm.forward_oot",
        "op": "acme_op" in CustomOp.op_registry,
        "class": "acme_class" in registry.classes,
        "form": "acme_form" in FUNCTIONALS and hasattr(opgraft.NATIVE, "acme_form"),
        "torch op": hasattr(torch.ops.opgraft, "acme_fast"),
        "torch op of a library": hasattr(torch.ops.acme_left_out, "acme_own"),
    }


@pytest.fixture(autouse=True)
def no_form_stays() -> Iterator[None]:
    """Forget the form and the torch ops of a test, which a fresh host does not."""
    yield
    if "acme_form" in FUNCTIONALS:
        unregister(FUNCTIONALS["acme_form"])
    for name in ("opgraft::acme_fast", "acme_left_out::acme_own"):
        torch_library._registered.pop(name, None)


PARTS = ("replacement", "op", "class", "form", "torch op", "torch op of a library")
NOTHING = dict.fromkeys(PARTS, False)
EVERYTHING = dict.fromkeys(NOTHING, True)


@pytest.mark.parametrize("fault", PLATFORM_FAULTS)
def test_nothing_of_a_platform_that_is_left_out_stays(site: Site, fault: str) -> None:
    """The next platform computes with its own kernels, and names are free for others."""
    source = DECLARES + PLATFORM_FAULTS[fault]
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)
    assert current_platform().name == "cpu"
    assert declared() == NOTHING
    assert host_state().active == []
    x = torch.randn(2, 4)
    torch.testing.assert_close(RMSNorm(4)(x), RMSNorm(4).forward_native(x))


ASKS = {
    "by an op": f"RMSNorm(4)\n{DEVICE}",
    "in its settings": DEVICE
    + "    def default_config(self):\n        return opgraft.current_platform().default_config()\n",
}


@pytest.mark.parametrize("way", ASKS)
def test_a_platform_that_asks_for_the_platform_too_early(site: Site, way: str) -> None:
    """One finding says what the platform did, at its own line, and nothing of the import that began again."""
    site.platform("acme", probe="return Evidence(True, 'here')", platform=DECLARES + ASKS[way])
    assert current_platform().name == "cpu"
    (finding,) = PLATFORM_FINDINGS.get()
    assert "'acme' asks for the platform of this process while its own class" in finding.message
    assert finding.location is not None
    assert finding.location.startswith(f"{site.folder}/acme_platform.py:")


def test_what_a_thread_of_the_platform_declares_goes_too(site: Site) -> None:
    """A platform may import its kernels in a thread, which it waits for."""
    thread = (
        "import importlib, threading\n"
        "thread = threading.Thread(target=importlib.import_module, args=('acme.kernels',))\n"
        "thread.start()\nthread.join()\nraise OSError('no driver')\n"
    )
    files = {
        "acme/__init__.py": "from opgraft import Evidence, PlatformSpec\n"
        "def probe(machine):\n    return Evidence(True, 'here')\n"
        "SPEC = PlatformSpec(probe, 'acme.device:Device')\n",
        "acme/device.py": thread,
        "acme/kernels.py": DECLARES,
    }
    site.install("acme", files, {"opgraft.platforms": ["acme = acme:SPEC"]})
    assert current_platform().name == "cpu"
    assert declared() == NOTHING


def test_a_platform_declares_again_after_reset(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the fault is mended, all that its modules declared is there, though they are not imported again."""
    fault = "    def default_config(self):\n        return OpgraftConfig() if ready else {}\n"
    source = f"{DECLARES}ready = False\n{DEVICE}{fault}"
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)
    assert declared() == NOTHING
    monkeypatch.setattr(importlib.import_module("acme_platform"), "ready", True)
    for _ in range(2):
        opgraft.reset()
        assert declared() == EVERYTHING
        assert current_platform().name == "acme"
    monkeypatch.setattr(importlib.import_module("acme_platform"), "ready", False)
    opgraft.reset()
    assert declared() == NOTHING


@pytest.mark.parametrize("available", [True, False])
def test_a_platform_decides_whoever_imports_its_modules(site: Site, available: bool) -> None:
    """A program that imports a platform's module first has its replacements on that platform only."""
    probe = f"return Evidence({available}, 'as it is')"
    site.platform("acme", probe=probe, platform=DECLARES + DEVICE)
    importlib.import_module("acme_platform")
    assert current_platform().name == ("acme" if available else "cpu")
    assert declared()["replacement"] is available


def test_another_platform_of_the_distribution_has_none_of_its_kernels(site: Site) -> None:
    """The second platform says what it goes without, and which setting brings it."""
    probe = "from opgraft import Evidence, PlatformSpec\ndef probe(machine):\n    return Evidence(True, 'here')\n"
    files = {
        "acme/__init__.py": "",
        "acme/kernels.py": DECLARES,
        "acme/first.py": f"{probe}SPEC = PlatformSpec(probe, 'acme.one:Device')\n",
        "acme/one.py": f"from acme.kernels import *\n{DEVICE}raise OSError('no driver')\n",
        "acme/second.py": f"{probe}SPEC = PlatformSpec(probe, 'acme.two:Device')\n",
        "acme/two.py": "from acme.kernels import *\n" + DEVICE.replace('"acme"', '"acme-two"'),
    }
    points = {"opgraft.platforms": ["acme = acme.first:SPEC", "acme-two = acme.second:SPEC"]}
    site.install("acme", files, points)
    for first in ("acme", "acme-two"):
        with set_config(OpgraftConfig(platform=first)):
            try:
                current_platform()
            except opgraft.OpgraftError:
                continue
            assert not declared()["replacement"]
    (told,) = [f for f in PLATFORM_FINDINGS.get() if "goes without AcmeNorm" in f.message]
    assert "Set OPGRAFT_PLATFORM=acme-two" in told.message


PLUGIN = f"""{DECLARES}
platforms = "any"

@opgraft.hookimpl
def opgraft_register_ops():
    pass
"""

PLUGIN_FAULTS = {
    "its module raises": "1 / 0\n",
    "its module ends the process": "raise SystemExit(3)\n",
    "it does not say where it applies": "del platforms\n",
    "it applies elsewhere": "platforms = ('npu',)\n",
    "a hook has an unknown name": "@opgraft.hookimpl\ndef opgraft_register_opps():\n    pass\n",
    "it vetoes itself": "@opgraft.hookimpl\ndef opgraft_veto():\n    return 'an old driver'\n",
    "its veto raises": "@opgraft.hookimpl\ndef opgraft_veto():\n    1 / 0\n",
    "its veto is no text": "@opgraft.hookimpl\ndef opgraft_veto():\n    return True\n",
    "its defaults raise": "@opgraft.hookimpl\ndef opgraft_config():\n    1 / 0\n",
    "its defaults are none": "@opgraft.hookimpl\ndef opgraft_config():\n    return {}\n",
    "its defaults name no op": "@opgraft.hookimpl\ndef opgraft_config():\n"
    "    return OpgraftConfig(providers={'rms_nrom': 'acme'})\n",
    "its hook raises": "@opgraft.hookimpl\ndef opgraft_register_ops():\n    1 / 0\n",
    "its hook returns something": "@opgraft.hookimpl\ndef opgraft_register_ops():\n    return 1\n",
    "its adapters raise": "@opgraft.hookimpl\ndef opgraft_graft_adapters():\n    yield 1 / 0\n",
    "its adapters are none": "@opgraft.hookimpl\ndef opgraft_graft_adapters():\n    return [1]\n",
}


@pytest.mark.parametrize("fault", PLUGIN_FAULTS)
def test_nothing_of_a_plugin_that_is_left_out_stays(site: Site, fault: str) -> None:
    """Whether it fails, vetoes itself or applies elsewhere: what its module declared is taken back."""
    site.plugin("acme", PLUGIN + PLUGIN_FAULTS[fault])
    load_plugins()
    assert host_state().plugins["acme"].status.value in ("failed", "vetoed", "rejected")
    assert declared() == NOTHING
    assert host_state().active == []
    assert host_state().adjustments == []
    assert PLUGIN_ADAPTERS.get() == []


def test_a_plugin_that_is_denied_later_is_left_out(site: Site) -> None:
    """After reset the deny list holds for what the plugin had declared before, too."""
    site.plugin("acme", PLUGIN)
    assert declared() == EVERYTHING
    opgraft.reset()
    with set_config(OpgraftConfig(plugins_disable=("acme",))):
        assert declared() == NOTHING
    opgraft.reset()
    assert declared() == EVERYTHING


def test_a_platform_that_is_not_chosen_later_is_left_out(site: Site) -> None:
    """After reset another platform may be asked for, which goes without what the first one declared."""
    site.platform("acme", probe="return Evidence(True, 'here')", platform=DECLARES + DEVICE)
    assert declared() == EVERYTHING
    opgraft.reset()
    with set_config(OpgraftConfig(platform="cpu")):
        assert declared() == NOTHING


def test_a_plugin_takes_a_name_that_was_given_back(site: Site) -> None:
    """Names of a plugin that is left out are free for another; it fails if it comes back, as it would have."""
    ready = "import acme_switch\nif not acme_switch.on:\n    raise OSError('no driver')\n"
    site.install("acme-switch", {"acme_switch.py": "on = False\n"}, {})
    site.plugin("acme", f"{DECLARES}{PLUGIN.removeprefix(DECLARES)}{ready}")
    op = DECLARES[DECLARES.index("@CustomOp") : DECLARES.index("@PluggableClass")]
    site.plugin(
        "bolt",
        f"import opgraft\nfrom opgraft import CustomOp\nplatforms = 'any'\n{op}"
        "@opgraft.hookimpl\ndef opgraft_register_ops():\n    pass\n",
    )
    load_plugins()
    statuses = {name: each.status.value for name, each in host_state().plugins.items()}
    assert statuses == {"acme": "failed", "bolt": "activated"}
    assert CustomOp.op_registry["acme_op"].__module__ == "bolt"


METHOD = "    @classmethod"


def method(text: str) -> tuple[str, str]:
    """A change of the platform's source that puts a class method before the others."""
    return METHOD, f"{METHOD}\n    def {text}:\n        1 / 0\n\n{METHOD}"


BRIDGE_FAULTS = {
    "its module raises": ("device_name", "raise OSError('no driver')\n    device_name"),
    "it is no platform": ("(Platform)", ""),
    "its class is missing": ("class AcmePlatform", "class AcmePlattform"),
    "its constructor raises": method("__new__(cls)"),
    "a property raises": ('device_type = "cpu"', "device_type = property(lambda self: 1 / 0)"),
    "a property has no value": ('dist_backend = "gloo"', "dist_backend = 1"),
    "its kernels raise": method("import_kernels(cls)"),
    "its early changes raise": ("import acme_vllm.quantization", "1 / 0"),
    "its defaults raise": method("apply_config_platform_defaults(cls, vllm_config)"),
    "its check raises": ("cache_config.block_size = 128", "raise ValueError('no')"),
    "its settings are refused": ("cache_config.block_size = 128", "cache_config.block_size = -1"),
}

REGISTERS_MORE = """
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

@register_quantization_config("acme_quantization")
class AcmeConfig(QuantizationConfig):
    pass
"""


def test_kernels_that_the_entry_point_of_vllm_imports(site: Site) -> None:
    """The module of the entry point registers ops, and its function names a class that is missing."""
    install_bridge(site)
    points = {"vllm.platform_plugins": ["acme = acme_vllm:register"]}
    entry = "from acme_vllm import ops\ndef register():\n    return 'acme_vllm.platform.AcmePlattform'\n"
    with imports_forgotten():
        install_acme(site, points, ops=OPS + REGISTERS_MORE, __init__=entry)
        assert current_platform().name == "cpu"
        assert RMSNorm(4).decision.chosen.startswith("RMSNorm.")
        assert host_state().active == []
        assert "acme_quantization" not in host_state().registry.classes


@pytest.mark.parametrize("fault", ["", *BRIDGE_FAULTS])
def test_nothing_of_a_platform_of_vllm_that_is_left_out_stays(site: Site, fault: str) -> None:
    """The platform's module imports its kernels; through the bridge, too, they go with the platform.

    The finding names a line of the plugin, not of the bridge.
    """
    install_bridge(site)
    source = PLATFORM.replace("class Acme", "from acme_vllm import ops\n\nclass Acme", 1)
    if fault:
        source = source.replace(*BRIDGE_FAULTS[fault], 1)
    points = {"vllm.platform_plugins": ["acme = acme_vllm:register"]}
    with imports_forgotten():
        install_acme(site, points, platform=source, ops=OPS + REGISTERS_MORE)
        assert current_platform().name == ("cpu" if fault else "acme")
        chosen = {op.decision.chosen.partition(".")[0] for op in (RMSNorm(4), SiluAndMul())}
        assert chosen == ({"RMSNorm", "SiluAndMul"} if fault else {"AcmeRMSNorm", "AcmeSiluAndMul"})
        assert ("acme_quantization" in host_state().registry.classes) is not bool(fault)
        if fault:
            place = PLATFORM_FINDINGS.get()[-1].location
            assert str(place).startswith(f"{site.folder}/acme_vllm/")


@pytest.mark.parametrize("fault", ["import", "call"])
def test_nothing_of_a_plugin_of_vllm_that_is_left_out_stays(site: Site, fault: str) -> None:
    """Its function imports its kernels and fails later, in the import or behind it."""
    install_bridge(site)
    ops = OPS + REGISTERS_MORE + ("1 / 0\n" if fault == "import" else "")
    entry = "def register_ops():\n    from acme_vllm import ops\n    1 / 0\n"
    with imports_forgotten():
        install_acme(
            site,
            {"vllm.general_plugins": ["acme_ops = acme_vllm:register_ops"]},
            ops=ops,
            __init__=entry,
        )
        load_plugins()
        assert host_state().plugins["acme_ops"].status.value == "failed"
        assert RMSNorm(4).decision.chosen.startswith("RMSNorm.")
        assert host_state().active == []
        assert "acme_quantization" not in host_state().registry.classes
