"""Patches of opgraft and torch after plugins were loaded: what is put back, what stays, and what no look disturbs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft.binding import blame
from opgraft.ops import NewGELU, RMSNorm
from opgraft.plugins.definitions import DEFINITIONS
from opgraft.plugins.guarding import LatePatches
from opgraft.plugins.host import load_plugins

pytestmark = pytest.mark.usefixtures("warm_children")

PATCHING = """
import torch
from opgraft.binding import blame
def zero(x):
    return x * 0
def patch():
    torch.rsqrt = zero
def patch_opgraft():
    blame.verdicts_on = zero
class Lazy:
    def __getattr__(self, name):
        raise RuntimeError('no device')
class Nowhere(Lazy):
    __module__ = property(lambda self: 1 / 0)
"""
PLUGIN = (
    f"{PATCHING}\nfrom opgraft.ops import NewGELU\nplatforms = 'any'\n"
    "class Acme(NewGELU):\n    def forward_oot(self, x):\n        return self.forward_native(x)\n"
    "NewGELU.register_oot(Acme)\n"
)
HERE = "return Evidence(True, 'here')"
ABSENT = "return Evidence(False, 'absent')"


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    """The functions that these tests replace are the former ones afterwards."""
    opgraft.reset()
    former = torch.rsqrt, blame.verdicts_on
    yield
    torch.rsqrt, blame.verdicts_on = former


def loaded(name: str) -> tuple[Any, LatePatches]:
    """The module, and the looks that begin after plugins were loaded."""
    load_plugins()
    return importlib.import_module(name), LatePatches()


def test_the_calls_that_are_looked_at(site) -> None:
    """A patch between the calls 1 and 8 stays until the eighth."""
    site.plugin("acme", PLUGIN)
    former = torch.rsqrt
    acme, patches = loaded("acme")
    patches.look_after_call()
    acme.patch()
    for _ in range(6):
        patches.look_after_call()
    assert torch.rsqrt is acme.zero
    patches.look_after_call()
    assert torch.rsqrt is former


@pytest.mark.parametrize("kind", ["Lazy", "Nowhere"])
def test_an_object_whose_attributes_raise(caplog, site, kind: str) -> None:
    """A look raises nothing, and puts back the object if its class tells the plugin."""
    site.plugin("acme", PLUGIN)
    former = torch.rsqrt
    acme, patches = loaded("acme")
    torch.rsqrt = getattr(acme, kind)()
    patches.look_after_call()
    assert (torch.rsqrt is former) == (kind == "Lazy")
    told = [each for each in caplog.messages if "acme 1.0 changed torch.rsqrt" in each]
    assert len(told) == (kind == "Lazy")


def test_a_look_that_fails(caplog, site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call keeps its result, and a warning tells why there was no look."""
    site.plugin("acme", PLUGIN)
    acme, patches = loaded("acme")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 5, acme)  # type: ignore[misc]
        patches.look_after_call()
    words = "the look for patches while a model ran ended: AttributeError: "
    assert [each for each in caplog.messages if each.startswith(words)]


def test_an_import_that_another_thread_reads(site) -> None:
    """A look leaves the definitions of an import to the step that reads imports."""
    site.plugin("acme", PLUGIN)
    _, patches = loaded("acme")
    DEFINITIONS.read()
    former = sys.modules.pop("torch.nn.cpp", None)
    with DEFINITIONS.imports_read():
        importlib.import_module("torch.nn.cpp")
        patches.look_after_call()
        assert DEFINITIONS.read().imported
    if former is not None:
        sys.modules["torch.nn.cpp"] = former


@pytest.mark.parametrize("probe", [HERE, ABSENT], ids=["chosen", "absent"])
def test_a_patch_by_a_distribution_with_a_platform(site, probe: str) -> None:
    """A patch of torch stays if the platform is the chosen one; a patch of opgraft never does."""
    site.platform("acme", probe=probe, plugin=PLUGIN)
    former = torch.rsqrt, blame.verdicts_on
    acme, patches = loaded("acme_plugin")
    acme.patch()
    acme.patch_opgraft()
    patches.look_after_call()
    assert (torch.rsqrt is acme.zero) == (probe == HERE)
    assert (torch.rsqrt is former[0]) == (probe == ABSENT)
    assert blame.verdicts_on is former[1]


def test_a_patch_by_a_distribution_without_a_plugin(caplog, site) -> None:
    """A platform alone is watched as well."""
    site.platform("acme", probe=ABSENT)
    (site.folder / "acme_platform.py").write_text(PATCHING, encoding="utf-8")
    former = blame.verdicts_on
    acme, patches = loaded("acme_platform")
    acme.patch_opgraft()
    patches.look_after_call()
    assert blame.verdicts_on is former
    assert [each for each in caplog.messages if "acme-dist 1.0 changed opgraft." in each]


BRIX = """
platforms = 'any'
import acme
import opgraft
def fake(x):
    return x * 0
@opgraft.hookimpl
def opgraft_register_ops(): ...
def patch():
    acme.zero = fake
"""


def test_a_patch_of_another_plugin(caplog, site) -> None:
    """The function of the other plugin is put back, and a plugin is free to replace its own."""
    site.plugin("acme", f"{PLUGIN}def other(x):\n    return x\n")
    site.plugin("brix", BRIX)
    acme, patches = loaded("acme")
    former = acme.zero
    sys.modules["brix"].patch()
    patches.look_after_call()
    assert acme.zero is former
    (told,) = [each for each in caplog.messages if "changed acme.zero" in each]
    assert told.startswith("brix 1.0 changed")
    acme.zero = acme.other
    patches.look("again")
    assert acme.zero is acme.other


def test_a_patch_by_a_script(site) -> None:
    """It stays, as no plugin has made it."""
    site.plugin("acme", PLUGIN)
    _, patches = loaded("acme")
    ours = lambda x: x  # noqa: E731
    torch.rsqrt = ours
    patches.look_after_call()
    assert torch.rsqrt is ours


CHECKED = """
import opgraft
from opgraft.ops import OP
from shared_check import has_npu
platforms = 'any'
class Kernel(OP):
    @opgraft.needs(has_npu)
    def forward_oot(self, x, residual=None):
        return self.forward_native(x)
OP.register_oot(Kernel)
"""
CHECK = """
import torch
patches = False
def has_npu():
    if patches:
        torch.rsqrt = abs
"""


def test_a_check_that_two_plugins_share(caplog, site) -> None:
    """Each use is watched for itself: the plugin is named whose kernel the check was asked for."""
    (site.folder / "shared_check.py").write_text(CHECK, encoding="utf-8")
    site.plugin("acme", CHECKED.replace("OP", "RMSNorm"))
    site.plugin("brix", CHECKED.replace("OP", "NewGELU"))
    former = torch.rsqrt
    load_plugins()
    RMSNorm(8)
    sys.modules["shared_check"].patches = True  # type: ignore[attr-defined]
    NewGELU()
    assert torch.rsqrt is former
    (told,) = [each for each in caplog.messages if "changed torch.rsqrt" in each]
    assert "the check of what Kernel.forward_oot of brix 1.0 needs" in told
