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
from opgraft.binding.pluggable_class import choose_class
from opgraft.errors import ConfigError
from opgraft.kernels.engine import Sampler
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


@pytest.mark.parametrize(
    ("listed", "winner", "factor"),
    [
        ("far/acme/brix", "acme", 3),
        ("brix/acme", "brix", 5),
        ("far/native", "native", 1),
        ("far/opgraft/acme", "opgraft", 1),
        ("none_such/acme", "acme", 3),
    ],
)
def test_the_first_of_a_list_that_applies(
    user, site, listed: str, winner: str, factor: int
) -> None:
    """Ops, forms and the switch of an op follow the first provider with a replacement for this platform."""
    site.plugin("far", PLUGIN.replace('"any"', '("cuda",)').format(factor=9))
    opgraft.reset()
    x = torch.randn(3, 8, dtype=torch.float64)
    native = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    of_form = listed.replace("opgraft", "app")
    names = f"rms_norm={listed},soften={of_form}"
    with set_config(OpgraftConfig(providers=names)):
        norm = RMSNorm(8, eps=1e-6).double()
        torch.testing.assert_close(norm(x), native * factor)
        torch.testing.assert_close(
            user.use(x), x * factor if factor > 1 else torch.nn.functional.softplus(x)
        )
        assert RMSNorm.enabled() is (winner != "native")
    why = str(norm.decision)
    assert f"providers asks for {winner!r}" in why
    assert f"the first of {listed} that applies" in why


def test_a_list_of_which_none_applies(user, site) -> None:
    """The error names the list, and the last provider with the reason against it."""
    site.plugin("far", PLUGIN.replace('"any"', '("cuda",)').format(factor=9))
    opgraft.reset()
    with (
        set_config(OpgraftConfig(providers={"rms_norm": ["none_such", "far"]})),
        pytest.raises(
            ConfigError,
            match=r"'far' for 'rms_norm' \(none of none_such/far applies, .*no replacement",
        ),
    ):
        RMSNorm(8)


def test_a_list_for_a_class_of_the_engine(user, site) -> None:
    """A class that is no op follows a list, too."""
    replaced = """
from opgraft.kernels.engine import Sampler
class Mine(Sampler):
    def likeliest(self, logits):
        return super().likeliest(logits)
@opgraft.hookimpl
def opgraft_register_ops():
    Sampler.register_oot(Mine)
"""
    site.plugin("samples", 'import opgraft\nplatforms = "any"\n' + replaced)
    opgraft.reset()
    for listed, name in (("none_such/samples", "Mine"), ("opgraft/samples", "Sampler")):
        with set_config(OpgraftConfig(providers=f"sampler={listed}")):
            assert choose_class(Sampler).cls.__name__ == name
