"""Which method becomes forward: the most derived definition wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft import (
    CompilationConfig,
    CustomOp,
    OpgraftConfig,
    PluggableLayer,
    current_platform,
    set_config,
)
from opgraft.binding.kernels import choose_kernel
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.errors import ConfigError, MissingKernelError, PlatformError
from opgraft.ops import Linear
from opgraft.platform import cpu_features, effective_chain
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.registry.decision import Candidate, Decision, Provider
from opgraft.testing.inventory import declared_platforms, kernel_keys

CPU = ("oot", "cpu", "native")
CUDA = ("oot", "cuda", "native")
ROCM = ("oot", "hip", "cuda", "native")
ALIKE = ("oot", "cuda", "native")


def family(*levels: str) -> type:
    """Classes derived from one another, each defining the methods named in its string (forward_<word> or forward)."""
    cls: type = CustomOp
    for depth, words in enumerate(levels):
        names = ["forward" if word == "forward" else f"forward_{word}" for word in words.split()]
        cls = type(f"Level{depth}", (cls,), {name: lambda self: None for name in names})
    return cls


RULES = [
    (("native cpu",), CPU, "Level0.forward_cpu"),
    (("native cuda",), CPU, "Level0.forward_native"),
    (("native cuda", "native"), CUDA, "Level1.forward_native"),
    (("native cuda", "oot"), CUDA, "Level1.forward_oot"),
    (("native cuda", "oot native"), CUDA, "Level1.forward_oot"),
    (("native cuda", ""), CUDA, "Level0.forward_cuda"),
    (("native cuda",), ROCM, "Level0.forward_cuda"),
    (("native cuda hip",), ROCM, "Level0.forward_hip"),
    (("native cuda hip", "cuda"), ROCM, "Level1.forward_cuda"),
    (("native cpu", "forward"), CPU, "Level1.forward"),
    (("native cpu", "forward oot"), CPU, "Level1.forward"),
    (("forward", "oot"), CPU, "Level1.forward_oot"),
    (("native cuda xpu",), ALIKE, "Level0.forward_cuda"),
]


@pytest.mark.parametrize(("levels", "chain", "expected"), RULES)
def test_the_most_derived_definition_wins(
    levels: tuple[str, ...], chain: tuple[str, ...], expected: str
) -> None:
    """Walking up the classes, the first that defines forward or a key of the chain settles it."""
    choice = choose_kernel(family(*levels), chain, True, "test")
    assert str(choice.winner) == expected
    accepted = [candidate.name for candidate in choice.decision.candidates if candidate.accepted]
    assert accepted == [expected]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (("native cpu",), "Level0.forward_native"),
        (("native cpu", "oot"), "Level0.forward_native"),
        (("native cpu", "native oot"), "Level1.forward_native"),
        (("native", "forward"), "Level1.forward"),
        (("native", "forward native"), "Level1.forward_native"),
        (("forward", "oot"), "Level0.forward"),
    ],
)
def test_a_disabled_op_runs_its_native_definition(levels: tuple[str, ...], expected: str) -> None:
    """forward_native where there is one, else the layer's own forward."""
    assert str(choose_kernel(family(*levels), CPU, False, "test").winner) == expected


def test_a_class_without_any_definition_is_an_error() -> None:
    """The error names the class, its place and what to define."""
    with pytest.raises(
        MissingKernelError, match=r"Level0 at .* defines neither forward nor a kernel"
    ):
        choose_kernel(family("xpu"), CPU, True, "test")


def test_calling_a_kernel_that_is_not_defined_goes_on_along_the_chain(scale) -> None:
    """self.forward_oot, forward_hip and friends reach the next definition of the platform's chain."""
    op = scale()
    x = torch.ones(4)
    for name in (
        "forward_oot",
        "forward_cpu",
        "forward_hip",
        "forward_xpu",
        "forward_tpu",
        "forward_native",
        "forward",
    ):
        torch.testing.assert_close(getattr(op, name)(x), x * 2)


def test_super_reaches_the_targets_kernel(scale, fast_scale) -> None:
    """super().forward_oot() and super().forward() of a replacement run what the target would run."""

    class Wrapping(scale):
        def forward(self, x, bias=None):
            return super().forward(x, bias) + 1

    scale.register_oot(Wrapping)
    assert scale(1)(torch.ones(1)).item() == 3
    CustomOp.unregister_oot(Wrapping)
    scale.register_oot(fast_scale)
    assert scale(1)(torch.ones(1)).item() == 2


def test_a_missing_kernel_at_the_end_of_the_chain_is_an_error() -> None:
    """An op without a native definition says so instead of recursing."""
    op = type("OnlyCpu", (CustomOp,), {"forward_cpu": lambda self, x: x})()
    with pytest.raises(
        MissingKernelError, match="has no forward_native, nor a kernel further along"
    ):
        op.forward_native(1)


def test_a_layers_own_forward_ends_the_chain() -> None:
    """In a layer without a native definition, super().forward_oot() of a replacement reaches the layer's forward."""

    class Layer(PluggableLayer):
        def forward(self, x):
            return x + 1

    @Layer.register_oot
    class Wrapped(Layer):
        def forward_oot(self, x):
            return super().forward_oot(x) * 10

    assert Layer()(1) == 20


def test_a_disabled_subclass_keeps_its_own_forward(scale) -> None:
    """A class that adds to an op in its own forward is not bypassed: its super().forward() runs the native form."""

    class Twice(scale):
        def forward(self, x, bias=None):
            return super().forward(x, bias) * 2

    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        op = Twice()
        assert op(torch.ones(4)).tolist() == [4.0] * 4
        assert (
            op.decision.chosen
            == "test_a_disabled_subclass_keeps_its_own_forward.<locals>.Twice.forward"
        )


def test_a_replacements_own_forward_is_switched_off(scale) -> None:
    """-op switches off a replacement that overrides forward as a whole."""
    scale.register_oot(type("Whole", (scale,), {"forward": lambda self, x, bias=None: x * 0}))
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["-scale"]))):
        assert scale()(torch.ones(4)).tolist() == [2.0] * 4


def test_a_layer_is_not_switched_but_a_replacements_kernel_is(scale) -> None:
    """custom_ops=none leaves a PluggableLayer's forward, and switches off a kernel that a replacement added to it."""

    @CustomOp.register("pair")
    class Pair(PluggableLayer):
        def forward(self, x):
            return x + 1

    @Pair.register_oot
    class FastPair(Pair):
        def forward_oot(self, x):
            return x + 2

    x = torch.zeros(1)
    assert Pair()(x) == 2
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        assert Pair()(x) == 1


@pytest.mark.parametrize("tokens", [["-scale"], ["none"]])
def test_switching_an_op_off_switches_its_replacement_off(scale, tokens: list[str]) -> None:
    """A replacement keeps the registered name of its target."""
    replacement = scale.register_oot(
        type("R", (scale,), {"forward_oot": lambda self, x, bias=None: x * 0})
    )
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=tokens))):
        op = scale()
        assert not scale.enabled()
    assert op.op_class is replacement
    torch.testing.assert_close(op(torch.ones(4)), torch.full((4,), 2.0))
    with set_config(
        OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none", "+scale"]))
    ):
        assert scale()(torch.ones(4)).sum() == 0


PASSED_OVER = "forward_oot of a class that is no replacement runs on out-of-tree platforms only"


def _both(cls: type, name: str) -> type:
    """Derive a class with kernels that return their own key."""
    members = {f"forward_{key}": _returning(key) for key in ("oot", "cpu", "native")}
    return type(name, (cls,), members)


def _returning(text: str) -> Callable[[Any, object], str]:
    return lambda self, x: text


def test_a_class_in_the_tree_runs_forward_oot_on_out_of_tree_platforms_only() -> None:
    """On the built-in cpu, forward_cpu runs for a registered class and for a subclass. The decision tells why."""
    op = CustomOp.register("in_tree")(_both(CustomOp, "InTree"))
    derived = _both(op, "Derived")
    for cls in (op, derived):
        made = cls()
        assert made(0) == "cpu"
        rejected = {each.name: each.reason for each in made.decision.candidates}
        assert rejected[f"{cls.__qualname__}.forward_oot"] == PASSED_OVER
        assert cls(enforce_enable=True)(0) == "cpu"
        assert kernel_keys(cls, declared_platforms())["cpu"] == "cpu"


def test_the_simulated_platform_is_built_in(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, forward_native of a class in the tree runs, and forward_oot of a replacement."""
    monkeypatch.setenv(SIMULATED_DEVICE, "default")
    # The CPU stays current: torch would keep a device of a chosen simulated platform.
    monkeypatch.setenv("OPGRAFT_PLATFORM", "cpu")
    opgraft.reset()
    op = CustomOp.register("simulated_too")(_both(CustomOp, "SimulatedToo"))
    assert kernel_keys(op, declared_platforms())["simulated"] == "native"
    op.register_oot(_both(op, "Replacing"))
    assert kernel_keys(op, declared_platforms())["simulated"] == "oot"


def test_forward_oot_of_a_replacement_comes_first_on_every_platform() -> None:
    """A replacement, a mixin of a replacement and a subclass of a replacement are out of the tree."""
    op = CustomOp.register("replaced")(_both(CustomOp, "Replaced"))
    mixin = type("Mixin", (), {"forward_oot": _returning("mixin")})
    mixed = type("Mixed", (mixin, op), {})
    fast = _both(op, "Fast")
    faster = type("Faster", (fast,), {"forward_oot": _returning("faster")})
    expected = {mixed: "mixin", fast: "oot"}
    for replacement, result in expected.items():
        op.register_oot(replacement)
        assert op()(0) == result, replacement
        if replacement is fast:
            assert (fast()(0), faster()(0)) == ("oot", "faster")
        CustomOp.unregister_oot(replacement)


def test_the_next_kernel_of_a_class_in_the_tree_is_not_its_forward_oot() -> None:
    """A replacement without kernels goes on to forward_cpu of the target, not to forward_oot."""
    op = CustomOp.register("followed")(_both(CustomOp, "Followed"))

    @op.register_oot
    class Wrapping(op):
        def forward(self, x: object) -> tuple[str, Any]:
            return "wrapped", super().forward(x)

    assert op()(0) == ("wrapped", "cpu")


def test_enforce_enable_holds_for_one_object(scale) -> None:
    """enforce_enable=True enables that instance whatever the settings say, and the decision says so."""
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        enforced, plain = scale(enforce_enable=True), scale()
    assert enforced.decision.chosen == "Scale.forward_cpu"
    assert "enforce_enable" in enforced.decision.reason
    assert plain.decision.chosen == "Scale.forward_native"


def test_custom_ops_name_an_op_by_its_class_too(scale) -> None:
    """``+Scale`` and ``+scale`` mean the same op, and contradict each other with other signs."""
    with set_config(
        OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none,+Scale"]))
    ):
        assert scale().decision.chosen == "Scale.forward_cpu"
        assert "'+scale' in custom_ops" in scale().decision.reason
    both = OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["+Scale", "-scale"]))
    with set_config(both), pytest.raises(ConfigError, match=r"both '\+Scale' and '-scale'"):
        scale()


def test_an_unknown_op_in_custom_ops_is_an_error_with_near_matches(scale) -> None:
    """A name that no catalogue knows is found when the first op is constructed."""
    with (
        set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["+scael"]))),
        pytest.raises(ConfigError, match=r"'scael' \(set_config\).*did you mean 'scale'"),
    ):
        scale()


@pytest.mark.parametrize("chain", [("cpu", "cpu"), ("npu",)])
def test_a_platform_must_declare_known_keys_once(chain: tuple[str, ...]) -> None:
    """A dispatch chain with an unknown or repeated key is rejected."""
    platform = type("P", (CpuPlatform,), {"dispatch_chain": chain})()
    with pytest.raises(PlatformError, match="declares the dispatch chain"):
        effective_chain(platform)


@pytest.mark.parametrize(
    ("members", "chain"),
    [
        ({"dispatch_chain": ("native",)}, ("oot", "cpu", "native")),
        ({"dispatch_chain": ("cuda",)}, ("oot", "cuda", "cpu", "native")),
        ({"dispatch_chain": ("cpu", "cuda")}, ("oot", "cpu", "cuda", "native")),
        ({"dispatch_chain": (), "runs_cpu_kernels": False}, ("oot", "native")),
        ({"dispatch_chain": (), "device_type": "npu"}, ("oot", "native")),
    ],
)
def test_a_platform_on_the_cpu_inherits_kernels_for_cpus(
    members: dict[str, object], chain: tuple[str, ...]
) -> None:
    """``cpu`` stands behind the declared keys if the device type is ``cpu``, unless the platform opts out."""
    assert effective_chain(type("P", (CpuPlatform,), members)()) == chain


CHIP = """
from opgraft import DeviceCapability
from opgraft.platforms.cpu.platform import CpuPlatform
class Device(CpuPlatform):
    name = "chip"
    dispatch_chain = ("native",)
    runs_cpu_kernels = {inherits}
    def capability(self, index=0):
        return DeviceCapability("chip", super().capability(index).dtypes)
"""


@pytest.mark.parametrize("inherits", [True, False])
def test_kernels_for_cpus_run_on_a_plugins_platform(site, inherits: bool) -> None:
    """A platform on the CPU that states no instruction sets has opgraft's linear kernel, unless it opts out."""
    expected = Linear(4, 4).decision.chosen if inherits else "Linear.forward_native"
    opgraft.reset()
    source = CHIP.format(inherits=inherits)
    site.platform("chip", probe="return Evidence(True, 'here')", platform=source)
    assert current_platform().name == "chip"
    assert Linear(4, 4).decision.chosen == expected
    assert cpu_features(current_platform()) == (
        CpuPlatform().capability().features if inherits else ()
    )


def test_a_plugins_platform_runs_forward_oot_of_a_class_in_the_tree(site) -> None:
    """On an out-of-tree platform forward_oot comes first, for a replacement and for a class in the tree."""
    op = CustomOp.register("on_chip")(_both(CustomOp, "OnChip"))
    opgraft.reset()
    source = CHIP.format(inherits=True)
    site.platform("chip", probe="return Evidence(True, 'here')", platform=source)
    assert op()(0) == "oot"
    keys = kernel_keys(op, declared_platforms())
    assert (keys["chip"], keys["cpu"], keys["cuda"]) == ("oot", "cpu", "native")


def test_default_on_is_what_holds_for_ops_that_no_setting_names() -> None:
    """default_on tells the default of custom_ops here and now, as plugins ask it."""
    assert CustomOp.default_on()
    with set_config(
        OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none", "+scale"]))
    ):
        assert not CustomOp.default_on()


def test_a_replacement_may_say_itself_whether_it_is_enabled(scale, fast_scale) -> None:
    """A class method ``enabled`` of a replacement counts before custom_ops, and the decision names it."""
    picky = type("Picky", (fast_scale,), {"enabled": classmethod(lambda cls: False)})
    scale.register_oot(picky)
    op = scale()
    assert op.decision.chosen == "Scale.forward_native"
    assert "disabled: Picky.enabled() says so" in str(op.decision)


def test_how_a_notebook_shows_a_decision() -> None:
    """The repr is one line. The table has each candidate, and text of others is escaped."""
    part = Decision("platform", "cpu", "the only one")
    rows = (
        Candidate("<fast>", False, "no & none", Provider("acme", "1.0")),
        Candidate("slow", True, "runs everywhere\x1b[31m"),
    )
    decision = Decision("op", "slow", "left over", rows, "a setting", (part,))
    assert repr(decision) == "<Decision op: slow (left over); 2 candidates>"
    shown = decision._repr_html_()
    for text in ("&lt;fast&gt;", "acme 1.0", "no &amp; none", "to change it: a setting"):
        assert text in shown
    assert "platform: cpu (the only one)" in shown
    assert "\x1b" not in shown
