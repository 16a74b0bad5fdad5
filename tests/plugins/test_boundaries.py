"""The bounds of what one plugin can do to others: names, registrations, conditions that raise, and what it prints."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, load_plugins, set_config
from opgraft.base.installed import version_of
from opgraft.config import resolve
from opgraft.errors import PluginError
from opgraft.machine.machine import Machine
from opgraft.ops import RMSNorm
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import discover
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.plugins.selection import decide_platform
from opgraft.registry.state import host_state
from support.faults.planting import GOOD, PLUGIN, in_time

ODD = """
import opgraft
from opgraft.ops import RMSNorm, SiluAndMul
platforms = "any"
class Odd(BaseException): pass
def odd(*_): raise Odd("from acme")
class AcmeNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x * 0
class AcmeSilu(SiluAndMul):
    def forward_oot(self, x):
        return x * 0
"""

ODDITIES = {
    "a condition": (
        "RMSNorm.register_oot(AcmeNorm, when=odd, priority=9)",
        "its when= condition raised Odd: from acme",
    ),
    "a need": (
        "AcmeNorm.forward_oot = opgraft.needs(odd)(AcmeNorm.forward_oot)\nRMSNorm.register_oot(AcmeNorm, priority=9)",
        "its needs() check raised Odd: from acme",
    ),
    "a switch": (
        "AcmeNorm.enabled = classmethod(odd)\nRMSNorm.register_oot(AcmeNorm, priority=9)",
        "raised Odd: from acme",
    ),
}


@pytest.mark.parametrize("kind", ODDITIES)
def test_what_is_no_exception_ends_nobody(site, kind: str) -> None:
    """Whoever constructs the op gets one that computes it, and its decision says what was raised."""
    source, words = ODDITIES[kind]
    site.plugin("acme", f"{ODD}{source}\n")
    site.plugin("brix", GOOD)
    op = RMSNorm(8, eps=1e-6).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(op(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    assert words in str(op.decision)


def test_a_platform_that_raises_what_is_no_exception(site) -> None:
    """Another one is chosen."""
    source = "from opgraft.platforms.cpu.platform import CpuPlatform\nclass Odd(BaseException): pass\nraise Odd('no')\n"
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)
    assert opgraft.current_platform().name == "cpu"
    (failure,) = PLATFORM_FINDINGS.get()
    assert "cannot be used: Odd: no" in failure.message


UNREGISTERS = """
import brix
@opgraft.hookimpl
def opgraft_register_ops():
    brix.RMSNorm.unregister_oot(brix.BrixRMSNorm)
"""


def test_what_another_one_registered_stays(site) -> None:
    """A plugin that takes it back is refused; who comes with it is not harmed."""
    site.plugin("brix", GOOD)
    site.plugin("aaa", PLUGIN + UNREGISTERS)  # hooks of the first are called last
    load_plugins()
    first = host_state().plugins["aaa"]
    assert first.status.value == "failed"
    assert "plugin 'aaa' unregisters brix:BrixRMSNorm at " in first.reason
    assert RMSNorm(4).op_class.__name__ == "BrixRMSNorm"
    opgraft.reset()
    assert RMSNorm(4).op_class.__name__ == "BrixRMSNorm"


def test_a_module_beside_the_built_in_platforms_is_not_built_in(site) -> None:
    """A distribution may lay one there; lists and lockfiles hold for it."""
    site.install("evil", {}, {"opgraft.platforms": ["evil = opgraft.platforms.evil:SPEC"]})
    (offer,) = (offer for offer in discover().offers if offer.name == "evil")
    assert not offer.built_in
    settings = resolve([("a block", OpgraftConfig(plugins=()))])
    assert (objection(offer, settings) or "").startswith("not on the allow list")
    assert {offer.name for offer in discover().offers if offer.built_in} == {
        "cpu",
        "cuda",
        "rocm",
        "tpu",
        "xpu",
    }


@pytest.mark.parametrize("name", ["brix-kernels", "Brix.Kernels", "opgraft", "OpGraft"])
def test_an_entry_point_has_no_name_of_another_distribution(site, name: str) -> None:
    """A setting that names the distribution would mean it, too."""
    site.install("brix-kernels", {"brix.py": GOOD}, {"opgraft.plugins": ["brix = brix"]})
    site.install("evil", {"evil.py": PLUGIN}, {"opgraft.plugins": [f"{name} = evil"]})
    assert [offer.name for offer in discover().offers if not offer.built_in] == ["brix"]
    (problem,) = discover().problems
    assert problem.provider.name == "evil"
    assert (
        f"its entry point {name!r} in opgraft.plugins has the name of the distribution"
        in problem.reason
    )


def test_a_deny_list_is_read_in_every_spelling(site) -> None:
    """Of an entry point as of a distribution."""
    site.install("acme-kernels", {"acme.py": PLUGIN}, {"opgraft.plugins": ["acme_fast = acme"]})
    for name in ("acme_fast", "ACME-Fast", "Acme_Kernels"):
        opgraft.reset()
        with set_config(OpgraftConfig(plugins_disable=[name])):
            load_plugins()
        assert host_state().plugins["acme_fast"].status.value == "rejected"


@pytest.mark.parametrize("strict", [True, False])
def test_who_is_shut_out_by_a_fault_is_told(site, caplog, strict: bool) -> None:
    """A process that serves without it says so: a warning, in strict mode an error."""
    site.plugin("acme", PLUGIN, requires=["opgraft>=99"])
    with (
        set_config(OpgraftConfig(strict=strict)),
        caplog.at_level(logging.WARNING, logger="opgraft"),
    ):
        if strict:
            with pytest.raises(
                PluginError,
                match=r"strict mode: plugin 'acme' of acme 1\.0 is not used: it requires",
            ):
                load_plugins()
        else:
            load_plugins()
            assert [
                line
                for line in caplog.messages
                if "plugin 'acme' of acme 1.0 is not used: it requires" in line
            ]


@pytest.mark.parametrize("names", [("aaa", "zzz"), ("zzz", "aaa")])
def test_the_order_of_a_listing_decides_nothing(
    site, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """Of two that offer one name the same one counts on each machine."""
    for name in names:
        site.install(name, {f"{name}.py": PLUGIN}, {"opgraft.plugins": [f"npu = {name}"]})
    listed = os.listdir

    def in_order(path: str = ".") -> list[str]:
        found = listed(path)
        return sorted(found, reverse=names[0] == "zzz") if str(path) == str(site.folder) else found

    monkeypatch.setattr(os, "listdir", in_order)
    opgraft.reset()
    (offer,) = (offer for offer in discover().offers if offer.name == "npu")
    assert offer.provider.name == "aaa"


def test_the_version_of_a_package_whose_metadata_is_a_pipe(site) -> None:
    """Nobody waits for it: none is known."""
    site.install(
        "acme", {"acme.py": PLUGIN}, {"opgraft.plugins": ["acme = acme"]}, requires=["torch>=2"]
    )
    site.install("planted", {}, {})
    assert version_of("planted") == Machine().version_of("planted") == "1.0"
    path = site.folder / "planted-1.0.dist-info/METADATA"
    path.unlink()
    os.mkfifo(path)
    with in_time():
        assert (version_of("planted"), Machine().version_of("planted")) == (None, None)
    assert version_of("nothing-of-that-name") is None


def test_a_traceback_moves_no_terminal() -> None:
    """An error that is not opgraft's is shown whole, each line of it visibly escaped."""
    code = (
        "from opgraft.cli.output import print_traceback\n"
        "try: raise RuntimeError('\\x1b]0;owned\\x07 platform: forged\\u202e')\n"
        "except RuntimeError as error: print_traceback(error)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stderr
    assert r"RuntimeError: \x1b]0;owned\x07 platform: forged\u202e" in shown
    assert "Traceback (most recent call last):" in shown
    assert "\x1b" not in shown


def test_a_probe_of_a_changed_platform_is_told(site, caplog) -> None:
    """A platform that is shut out by a fault is no silent one either."""
    site.install(
        "acme",
        {"acme.py": ""},
        {"opgraft.platforms": ["acme = acme:SPEC"]},
        requires=["opgraft>=99"],
    )
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        decide_platform(resolve([]), Machine())
    assert [
        line
        for line in caplog.messages
        if "platform 'acme' of acme 1.0 is left out: it requires" in line
    ]
