"""Providers are chosen by one grammar everywhere, for ops and for functional forms that were imported before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, set_config
from opgraft.binding.functional import FUNCTIONALS, unregister
from opgraft.ops import RMSNorm

APP = """
import opgraft
import torch
@opgraft.register_functional("soften", fake=torch.empty_like)
def soften(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x)
@opgraft.CustomOp.register("soften")
class Soften(opgraft.CustomOp):
    @opgraft.calls_functional
    def forward_native(self, x, *, functional=opgraft.NATIVE):
        return functional.soften(x)
"""
USER = """
from app import soften
class Layer:
    activation = staticmethod(soften)
def use(x):
    return soften(x)
"""
PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
class Norm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return RMSNorm.forward_native(self, x, residual) * {factor}
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Norm, priority={factor})
    from app import Soften
    class Times(Soften):
        functional_oot = {{"soften": lambda x: x * {factor}}}
    Soften.register_oot(Times, priority={factor})
"""
CHOICE = "soften=acme,rms_norm=native"
WAYS = ("a block of text", "a block of pairs", "the environment", "a file")


@pytest.fixture
def user(site) -> Iterator[ModuleType]:
    """A program that imported a functional form before any plugin was loaded, and two plugins that replace it."""
    site.install("app", {"app.py": APP, "user.py": USER}, {})
    site.plugin("acme", PLUGIN.format(factor=3))
    site.plugin("brix", PLUGIN.format(factor=5))
    import user  # type: ignore[import-not-found]

    opgraft.reset()
    yield user
    unregister(FUNCTIONALS["soften"])  # the next test imports another copy of the program


@contextmanager
def chosen(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """Make the same choice in one of the ways."""
    (tmp_path / "settings.toml").write_text(f'providers = "{CHOICE}"\n')
    pairs = dict(pair.split("=") for pair in CHOICE.split(","))
    blocks = {"a block of text": CHOICE, "a block of pairs": pairs}
    if way == "the environment":
        monkeypatch.setenv("OPGRAFT_PROVIDERS", CHOICE)
    elif way == "a file":
        monkeypatch.setenv("OPGRAFT_CONFIG", str(tmp_path / "settings.toml"))
    opgraft.reset()
    with set_config(OpgraftConfig(providers=blocks[way])) if way in blocks else nullcontext():
        yield


@pytest.mark.parametrize("way", WAYS)
def test_a_choice_holds_however_it_is_made(
    user, monkeypatch: pytest.MonkeyPatch, tmp_path, way: str
) -> None:
    """Bindings that a program made before, in a class too, run the chosen function, and ops the chosen kernel."""
    x = torch.randn(3, 8, dtype=torch.float64)
    native = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for function in (user.use, user.Layer().activation):
        torch.testing.assert_close(function(x), x * 5)
    torch.testing.assert_close(RMSNorm(8, eps=1e-6).double()(x), native * 5)
    with chosen(way, monkeypatch, tmp_path):
        for function in (user.use, user.Layer().activation):
            torch.testing.assert_close(function(x), x * 3)
        torch.testing.assert_close(RMSNorm(8, eps=1e-6).double()(x), native)


def test_a_choice_on_the_command_line(cli, user) -> None:
    """The option takes the very text."""
    for op, winner, file in (
        ("soften", "Times.forward_oot", "acme.py"),
        ("rms_norm", "RMSNorm.forward_native", ""),
    ):
        told = json.loads(cli("ops", "explain", op, "--json", "--providers", CHOICE).stdout)[
            "decision"
        ]
        assert told["chosen"].endswith(winner)
        (accepted,) = (row for row in told["candidates"] if row["accepted"])
        assert file in accepted["location"]
