"""Choosing by hand, and by conditions that a replacement states."""

from __future__ import annotations

import pickle
import re

import opgraft
import pytest
import torch
from opgraft import DeviceCapability, OpgraftConfig, PluggableLayer, When, set_config
from opgraft.errors import PluginError, RegistrationError
from opgraft.ops import RMSNorm
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.registry.conditions import objection_of
from opgraft.registry.decision import Provider
from opgraft.registry.op_classes import check_replacement
from opgraft.registry.state import host_state

PROVIDER = Provider("acme", "1.0")


def test_native_is_a_choice_that_no_other_setting_overrules(scale, fast_scale, monkeypatch) -> None:
    """Chosen as native, an op has its own class and its native definition, though it is replaced and has a kernel."""
    scale.register_oot(fast_scale)
    with set_config(OpgraftConfig(providers="scale=native"), origin="a block"):
        op = scale()
    assert op.op_class is scale
    assert str(op.binding.kernel.winner) == "Scale.forward_native"
    assert op.decision.reason.count("providers asks for 'native'") == 2
    assert (
        op.decision.setting
        == "providers is set by a block, which outranks OPGRAFT_PROVIDERS: change it there"
    )
    monkeypatch.setattr(scale, "enabled", classmethod(lambda cls: True))
    with set_config(OpgraftConfig(providers="scale=native")):
        opgraft.reset()
        assert str(scale().binding.kernel.winner) == "Scale.forward_native"
    assert str(scale().binding.kernel.winner) == "Scale.forward_cpu"


def test_an_existing_op_keeps_its_class_whatever_is_chosen(scale, fast_scale) -> None:
    """A provider that is chosen for what is constructed does not keep an op that was saved before from loading."""
    saved = pickle.dumps(scale())
    scale.register_oot(fast_scale)
    with set_config(OpgraftConfig(providers={"scale": "support"})):
        assert scale().op_class is fast_scale
        assert pickle.loads(saved).op_class is scale  # noqa: S301  # its own bytes


class Sm(CpuPlatform):
    """A platform whose device has a compute level and no float64."""

    name = "cuda"

    def capability(self, index: int = 0) -> DeviceCapability:
        return DeviceCapability("H100", (torch.float32, torch.bfloat16), features=("sm_90", "tma"))


@pytest.mark.parametrize(
    ("condition", "against"),
    [
        (When(platform="rocm, cuda"), None),
        (When(platform="rocm"), "platform is cuda, wanted rocm"),
        (When(capability=">=8.0,<10"), None),
        (When(capability=">=8.0,<9"), "compute level of H100 is 9.0, wanted >=8.0,<9"),
        (When(capability="tma,>=9"), None),
        (When(capability="wgmma"), "capability wgmma is none of H100"),
        (When(dtype="bfloat16,float32"), None),
        (When(dtype="float64"), "dtype float64 is none of H100: float32, bfloat16"),
        (When(package="torch>=2,<99,pytest"), None),
        (When(package="pytest>=99"), "pytest is .*, wanted pytest>=99"),
        (When(package="flash-attn"), "flash-attn is not installed, wanted flash-attn"),
        (When(platform="cuda", package="flash-attn"), "flash-attn is not installed"),
    ],
)
def test_conditions_say_what_does_not_hold(condition: When, against: str | None) -> None:
    """Every part of a condition must hold; the reason names what is there and what was wanted."""
    found = objection_of(condition, Sm(), "its condition", PROVIDER)
    if against is None:
        assert found is None
    else:
        assert found is not None
        assert re.match(f"its when= condition is false here: {against}", found)


class Failing(Sm):
    """A platform that cannot tell its capability."""

    def capability(self, index: int = 0) -> DeviceCapability:
        raise RuntimeError("the driver is gone")


def test_a_platform_that_cannot_tell_its_capability() -> None:
    """The error names the platform: a kernel that waits for a capability is not left out silently."""
    words = "platform 'cuda' cannot tell its capability, .*: RuntimeError: the driver is gone"
    whose = Provider("acme", "1.0")
    with pytest.raises(PluginError, match=words):
        objection_of(When(capability=">=8"), Failing(), "the condition", whose)
    assert objection_of(When(platform="cuda"), Failing(), "the condition", whose) is None


@pytest.mark.parametrize("method", ["forward_oot", "forward_native", "__init__"])
def test_an_async_method_is_refused(scale, method: str) -> None:
    """Nobody would await the result, so that registration names the method with file and line."""

    async def never_awaited(self, *args, **kwargs):
        return None

    never_awaited.__name__ = method
    replacement = type("Late", (scale,), {method: never_awaited})
    with pytest.raises(RegistrationError, match="an async function, which nobody awaits"):
        scale.register_oot(replacement, when=never_awaited)
    with pytest.raises(RegistrationError, match=rf"Late\.{method} at .* is an async function"):
        check_replacement(scale, replacement)


def test_a_device_without_a_compute_level() -> None:
    """Bounds of a level are not held by a device that has none."""
    found = objection_of(When(capability=">=8"), CpuPlatform(), "its condition", PROVIDER)
    assert found is not None
    assert "is not known, wanted >=8" in found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: When(), "states no condition"),
        (lambda: When(platform=("cuda", "rocm")), "use text, several joined by commas"),
        (lambda: When(capability=">=eight"), "malformed"),
        (lambda: When(package="flash attn"), "malformed"),
        (lambda: When(platform=","), "has no term in platform: give one"),
        (lambda: When(platform="cuda", capability=" , "), "has no term in capability: give one"),
        (lambda: When(dtype="bf16"), "'bf16'.* is no floating-point dtype: .*bfloat16"),
        (lambda: When(dtype="float32,half"), "'half'.* is no floating-point dtype: "),
        (lambda: When(dtype="int8"), "'int8'.* is no floating-point dtype: "),
        (
            lambda: RMSNorm.register_oot(priority="high")(type("A", (RMSNorm,), {})),
            "priority='high': use an integer",
        ),
        (
            lambda: RMSNorm.register_oot(when="cuda")(type("A", (RMSNorm,), {})),
            r"when='cuda': use opgraft\.When",
        ),
    ],
)
def test_options_of_a_registration_are_checked(make, message: str) -> None:
    """What no registration can mean is refused when it is made."""
    with pytest.raises(RegistrationError, match=message):
        make()


def test_a_condition_is_asked_once(scale, fast_scale) -> None:
    """Not for every class and every scope, nor at a call: once, until the platform is decided anew."""
    asked = []

    def condition(platform: opgraft.Platform) -> bool:
        asked.append(platform.name)
        return True

    scale.register_oot(when=condition)(fast_scale)
    for _ in range(3):
        with set_config(OpgraftConfig(strict=True)):
            scale()(torch.ones(4))
            host_state().invalidate()
    assert asked == ["cpu"]
    opgraft.reset()
    scale.register_oot(fast_scale)
    assert scale().op_class is fast_scale
    assert asked == ["cpu", "cpu"]


def test_a_declared_condition_stands_in_the_decision(scale, fast_scale) -> None:
    """The reason says which part of it does not hold."""
    scale.register_oot(when=When(platform="tpu"))(fast_scale)
    assert "its when= condition is false here: platform is cpu, wanted tpu" in str(scale().decision)


class EvenScale(RMSNorm):
    """A kernel for even sizes, which is off by one so that a test sees it."""

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if x.shape[0] % 2 or residual is not None:
            return super().forward_oot(x, residual)
        out = self.forward_native(x, residual)
        assert isinstance(out, torch.Tensor)
        return out + 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_leaves_some_arguments_to_the_op(compiled: bool) -> None:
    """Calls that the replacement hands on by super() run the op's own kernel, in one graph for both."""
    RMSNorm.register_oot(EvenScale)
    op = RMSNorm(4)
    call = torch.compile(op, fullgraph=True, backend="eager", dynamic=False) if compiled else op
    for rows, added in ((2, 1.0), (3, 0.0), (4, 1.0)):
        x = torch.randn(rows, 4)
        expected = torch.nn.functional.rms_norm(x.double(), (4,), eps=1e-6) + added
        torch.testing.assert_close(call(x).double(), expected, rtol=1e-5, atol=1e-5)
    with set_config(OpgraftConfig(providers="rms_norm=native")):
        assert RMSNorm(4)(torch.zeros(2, 4)).sum() == 0


def test_no_option_tests_the_arguments_of_a_call() -> None:
    """A registration has a priority and a condition, and no test of arguments."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'supports'"):
        RMSNorm.register_oot(supports=lambda x: True)


def test_nothing_stands_around_a_kernel(scale, fast_scale) -> None:
    """The bound method is the kernel itself, with no function around it."""
    scale.register_oot(fast_scale)
    assert type(scale()).forward is fast_scale.forward_oot


def test_a_layer_takes_the_same_options(scale) -> None:
    """``PluggableLayer.register_oot`` passes them on."""
    lower = type("Lower", (scale,), {"forward_oot": lambda self, x, bias=None: x - 1})
    higher = type("Higher", (scale,), {"forward_oot": lambda self, x, bias=None: x})
    PluggableLayer.register_oot(higher, "Scale", priority=1)
    PluggableLayer.register_oot(lower, "Scale")
    absent = type("Absent", (scale,), {"forward_oot": lambda self, x, bias=None: x + 1})
    PluggableLayer.register_oot(absent, "Scale", priority=2, when=When(platform="tpu"))
    assert scale(2).op_class is higher
    torch.testing.assert_close(scale(2)(torch.ones(2)), torch.ones(2))
