"""Declaring ops and replacements: forms, checks, pending targets, priorities, undo."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable

import opgraft
import pytest
import torch
from opgraft import (
    CustomOp,
    OpgraftConfig,
    PluggableLayer,
    load_plugins,
    maybe_get_oot_by_class,
    needs,
    set_config,
)
from opgraft.binding import specialisation as binding
from opgraft.errors import ConfigError, ConflictError, RegistrationError, UnknownTargetError
from opgraft.ops import RotaryEmbedding, SiluAndMul
from opgraft.registry.signatures import called_with
from opgraft.registry.state import host_state
from opgraft.testing.diagnosis import unapplied_registrations


def kernel(self, x, bias=None):
    """A kernel for classes made on the spot."""
    return x


FUNCTIONALS: dict[str, Callable] = {
    "by class name": lambda target, cls: CustomOp.register_oot("Scale")(cls),
    "by op name": lambda target, cls: CustomOp.register_oot("scale")(cls),
    "by module and class": lambda target, cls: CustomOp.register_oot(f"{target.__module__}:Scale")(
        cls
    ),
    "by keyword": lambda target, cls: CustomOp.register_oot(name="Scale")(cls),
    "by class": lambda target, cls: CustomOp.register_oot(target)(cls),
    "bare on the target": lambda target, cls: target.register_oot(cls),
    "called on the target": lambda target, cls: target.register_oot()(cls),
    "by call": lambda target, cls: CustomOp.register_oot(_decorated_op_cls=cls, name="Scale"),
    "by call on a layer": lambda target, cls: PluggableLayer.register_oot(
        _decorated_layer_cls=cls, name="Scale"
    ),
    "on the layer base": lambda target, cls: PluggableLayer.register_oot("Scale")(cls),
    "in a loop": lambda target, cls: [
        CustomOp.register_oot(_decorated_op_cls=c, name=n) for n, c in [("Scale", cls)]
    ][-1],
}


@pytest.mark.parametrize("form", FUNCTIONALS)
def test_every_form_of_register_oot_replaces_and_returns_the_class(
    form: str, scale, fast_scale
) -> None:
    """Each documented form declares the replacement and hands the class back."""
    assert FUNCTIONALS[form](scale, fast_scale) is fast_scale
    op = scale()
    assert op.op_class is fast_scale
    assert isinstance(op, scale)
    assert CustomOp.op_registry_oot["Scale"] is fast_scale
    assert maybe_get_oot_by_class(scale) is fast_scale


def test_a_call_without_a_name_means_the_class_of_that_name(scale) -> None:
    """register_oot(_decorated_op_cls=C) alone replaces the op whose class is called like C."""
    replacement = type("Scale", (scale,), {"__module__": "elsewhere", "forward_oot": kernel})
    CustomOp.register_oot(_decorated_op_cls=replacement)
    assert scale().op_class is replacement


def test_the_registries_are_read_only(scale) -> None:
    """op_registry and op_registry_oot are views that cannot be written to."""
    assert CustomOp.op_registry["scale"] is scale
    for registry in (CustomOp.op_registry, CustomOp.op_registry_oot):
        with pytest.raises(TypeError):
            registry["other"] = scale
        assert isinstance(len(registry), int)
        assert repr(registry).startswith("{")


def test_a_replacement_that_is_no_subclass_is_rejected(scale) -> None:
    """The error names both classes and where the replacement stands."""

    class Unrelated(CustomOp):
        def forward_oot(self, x, bias=None):
            return x

    with pytest.raises(
        RegistrationError, match=r"Unrelated at .*test_registration.py:\d+.*not a subclass"
    ):
        scale.register_oot(Unrelated)
    assert not host_state().active


@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        ("forward_oot", lambda self, x: x, "bias"),
        ("forward_cpu", lambda self, x, offset=None: x, "bias"),
        ("forward", lambda self, x, bias, extra: x, "required"),
        ("__init__", lambda self, size=4: None, "factor"),
        ("__init__", lambda self, size, factor=2.0, *, enforce_enable=False: None, "required"),
    ],
)
def test_a_narrower_method_is_rejected(
    scale, method: str, function: Callable, message: str
) -> None:
    """Constructor, forward and kernels must take every call that the target's take."""
    replacement = type("Narrow", (scale,), {method: function})
    with pytest.raises(
        RegistrationError, match=rf"Narrow.{method}.*narrower than Scale.*{message}"
    ):
        scale.register_oot(replacement)


def native(self, positions, query, key=None, offsets=None):
    """A kernel that takes every call."""
    return query


class Turn(CustomOp):
    """An op that says how it is called."""

    @called_with(never=["config"])
    def __init__(self, size: int = 4, config: object = None) -> None:
        super().__init__()

    @called_with(always=["key"], never=["offsets"], by_position=["positions"])
    def forward_native(self, positions, query, key=None, offsets=None):
        return query


ACCEPTED_WITH_FINDINGS: list[tuple[dict[str, object], str]] = [
    (
        {"forward_oot": lambda self, positions, query, key, offsets=None: query},
        "missing a required argument: 'key'",
    ),
    (
        {"forward_oot": lambda self, positions, query, key=None: query},
        "too many positional|offsets",
    ),
    ({"forward_oot": lambda self, p, query, key=None, offsets=None: query}, "'positions'|'p'"),
    ({"forward_oot": native, "__init__": lambda self, size=4: CustomOp.__init__(self)}, "config"),
    ({"forward_oot": native, "forward_xpu": staticmethod(lambda x: x)}, "forward_xpu .* narrower"),
    ({"forward": native, "forward_oot": staticmethod(lambda x: x)}, "forward_oot .* narrower"),
    ({"_split_heads": kernel}, "No op calls _split_heads"),
]


@pytest.mark.parametrize(("members", "finding"), ACCEPTED_WITH_FINDINGS)
def test_a_narrower_method_that_no_caller_notices_is_a_finding(members: dict, finding: str) -> None:
    """Calls that are never made may fail: the replacement is used, and its record says what it does not take."""
    CustomOp.register("turn")(Turn)
    cls = Turn.register_oot(type("Narrow", (Turn,), members))
    assert Turn().op_class is cls
    (record,) = host_state().active
    (found,) = record.findings
    assert re.search(finding, found)


@pytest.mark.parametrize(
    "members",
    [
        {"forward_oot": lambda self, positions, query: query},
        {"forward_oot": lambda self, positions, query, key, mask: query},
        {"forward_native": native, "forward_xpu": staticmethod(lambda x: x)},
        {
            "forward_oot": needs(lambda: "a device")(
                lambda self, positions, query, key=None, offsets=None: query
            ),
            "forward_xpu": staticmethod(lambda x: x),
        },
        {"forward_oot": native, "forward_native": lambda self, x: x},
        {"forward_oot": native, "__init__": lambda self, size: None},
    ],
)
def test_a_narrower_method_that_a_caller_would_notice_is_an_error(members: dict) -> None:
    """A key that every caller gives, and a kernel that may be bound after all, are checked whatever is marked."""
    CustomOp.register("turn")(Turn)
    with pytest.raises(RegistrationError, match="is narrower than Turn"):
        Turn.register_oot(type("Narrow", (Turn,), members))


class _Doubling:
    def __call__(self, x):
        return x + x


KERNELS = {
    "a function of torch": staticmethod(torch.relu),
    "a function with a fixed argument": functools.partialmethod(
        lambda self, x, factor: x * factor, factor=2.0
    ),
    "an object that can be called": _Doubling(),
}
"""What Python calls with the arguments of an activation, though no function of Python."""


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_may_be_anything_that_can_be_called(kind: str) -> None:
    """It runs as Python would call it."""
    cls = type("Mine", (SiluAndMul,), {"forward_oot": KERNELS[kind]})
    SiluAndMul.register_oot(cls)
    x = torch.rand(3, 4)
    expected = x if kind == "a function of torch" else x * 2
    assert torch.equal(SiluAndMul()(x), expected)


@pytest.mark.parametrize(
    "value", [None, property(lambda self: None), 3], ids=lambda value: type(value).__name__
)
def test_a_kernel_that_cannot_be_called_is_rejected(value: object) -> None:
    """The error names the attribute, its class and what it is."""
    cls = type("Mine", (SiluAndMul,), {"forward_oot": value, "__module__": __name__})
    words = rf"Mine\.forward_oot of the class at .* is no method but {type(value).__name__}"
    with pytest.raises(RegistrationError, match=words):
        SiluAndMul.register_oot(cls)


@pytest.mark.parametrize("when", ["before loading", "after loading"])
def test_an_unknown_target_costs_its_registration_alone(
    scale, fast_scale, caplog, when: str
) -> None:
    """A name that nothing has is reported with near matches; another registration of the script counts."""
    if when == "after loading":
        load_plugins()
    CustomOp.register_oot("Scael")(fast_scale)
    other = type("Other", (scale,), {"forward_oot": kernel})
    CustomOp.register_oot("Scale")(other)
    assert scale().op_class is other
    (warning,) = [each.getMessage() for each in caplog.records if "Scael" in each.getMessage()]
    assert re.search(r"replaces 'Scael'.*did you mean 'Scale'\?.*It is left out", warning)
    assert [each.cls for each in host_state().active] == [other]


def test_an_unknown_target_is_an_error_in_strict_mode(scale, fast_scale) -> None:
    """In strict mode the name must exist: when plugins have been loaded, and at once from then on."""
    with set_config(OpgraftConfig(strict=True)):
        CustomOp.register_oot("Scael")(fast_scale)
        with pytest.raises(UnknownTargetError, match=r"did you mean 'Scale'\?"):
            load_plugins()
        CustomOp.unregister_oot(fast_scale)
        load_plugins()
        with pytest.raises(UnknownTargetError, match=r"did you mean 'Scale'\?"):
            CustomOp.register_oot("Scael")(fast_scale)


def test_a_pending_target_may_be_registered_later(fast_scale) -> None:
    """A plugin may name an op of a package that is imported after it."""

    class Late(CustomOp):
        def forward_native(self, x):
            return x

    class FastLate(Late):
        def forward_oot(self, x):
            return x + 1

    CustomOp.register_oot("late")(FastLate)
    CustomOp.register("late")(Late)
    assert Late()(torch.zeros(1)) == 1


def test_the_same_class_twice_is_a_no_op(scale, fast_scale) -> None:
    """Plugins are re-entrant: declaring again changes nothing."""
    for _ in range(2):
        scale.register_oot(fast_scale)
    assert len(host_state().active) == 1
    CustomOp.register("scale")(scale)


def test_a_reloaded_definition_supersedes_the_old_one(scale, site) -> None:
    """Running a notebook cell or reloading a module again is no conflict: the newer class counts."""
    source = (
        "from opgraft import CustomOp\nScale = CustomOp.op_registry['scale']\n"
        "@Scale.register_oot\nclass Reloaded(Scale):\n    def forward_oot(self, x, bias=None):\n        return x + {}\n"
    )
    file = site.folder / "notebook.py"
    file.write_text(source.format(1))
    module = importlib.import_module("notebook")
    file.write_text(
        source.format(2000)
    )  # another length, so that no cached bytecode is taken for it
    importlib.reload(module)
    assert (scale()(torch.zeros(4)) == 2000).all()
    assert len(host_state().active) == 1


def test_classes_of_one_factory_are_different(scale) -> None:
    """A loop that makes kernels with one name does not silently keep the last: two of them are a tie."""

    def make(value: int) -> type:
        return type("Made", (scale,), {"forward_oot": lambda self, x, bias=None: x + value})

    scale.register_oot(make(1))
    scale.register_oot(make(2))
    with pytest.raises(
        ConflictError,
        match=r"Made .* and Made .*They have one provider, which decides by register_oot",
    ):
        scale()


@pytest.mark.parametrize(
    ("names", "hint"),
    [([], "Define forward_oot"), (["forward_ooot"], "did you mean 'forward_oot'")],
)
def test_a_replacement_that_changes_nothing_is_rejected(scale, names: list[str], hint: str) -> None:
    """A misspelt kernel, or none at all, would be constructed in silence and never run."""
    with pytest.raises(RegistrationError, match=hint):
        scale.register_oot(type("Empty", (scale,), dict.fromkeys(names, kernel)))


def test_a_mixin_behind_the_op_is_no_kernel(scale) -> None:
    """The bases' order decides: a kernel behind the op class is never reached, and the error says so."""
    mixin = type("Mixin", (), {"forward_oot": kernel})
    with pytest.raises(RegistrationError, match="stands before Scale in the bases"):
        scale.register_oot(type("Behind", (scale, mixin), {}))
    assert scale.register_oot(type("Before", (mixin, scale), {})) is scale().op_class


def test_a_replacement_cannot_be_a_target(scale, fast_scale) -> None:
    """A replacement of a replacement would never fire through the original class."""
    scale.register_oot(fast_scale)
    with pytest.raises(
        RegistrationError, match=r"itself a replacement of Scale.*with a higher priority"
    ):
        fast_scale.register_oot(type("Faster", (fast_scale,), {"forward_oot": kernel}))


def test_only_ops_can_be_targets() -> None:
    """A plain module is not constructed through the registry, so replacing it is an error with the way out."""
    with pytest.raises(RegistrationError, match=r"no opgraft\.CustomOp.*graft\(\)"):
        CustomOp.register_oot(name=torch.nn.Linear)(type("L", (torch.nn.Linear,), {}))
    assert maybe_get_oot_by_class(torch.nn.Linear) is torch.nn.Linear


def test_a_variant_of_an_op_can_be_a_target_by_class() -> None:
    """RotaryEmbedding derives from the registered class; every form of naming it works."""
    cls = type(
        "Fast",
        (RotaryEmbedding,),
        {"forward_oot": lambda self, positions, query, key=None: (query, key)},
    )
    CustomOp.register_oot(RotaryEmbedding)(cls)
    assert maybe_get_oot_by_class(RotaryEmbedding) is cls


@pytest.mark.parametrize(
    "module", ["opgraft.ops", "opgraft.ops.rotary", "opgraft.ops.rotary.modules"]
)
def test_a_target_by_any_module_that_exports_it(module: str) -> None:
    """``module:Class`` names a class by where it is imported from, which may be a package around its module."""
    assert host_state().registry.find_target(f"{module}:RotaryEmbedding") is RotaryEmbedding
    assert host_state().registry.find_target("opgraft.ops.layernorm:RotaryEmbedding") is None


def test_providers_must_name_ops(scale) -> None:
    """A misspelt op in the providers setting is an error with near matches, as in custom_ops."""
    with (
        set_config(OpgraftConfig(providers={"scael": "acme"})),
        pytest.raises(ConfigError, match="did you mean 'scale'"),
    ):
        scale()


def test_a_binding_decided_before_a_registration_is_not_kept(
    scale, fast_scale, monkeypatch
) -> None:
    """A registration that lands while another thread decides is not hidden by that thread's older choice."""
    decide = binding._decide_binding

    def overtaken(cls, **options):
        result = decide(cls, **options)
        scale.register_oot(fast_scale)
        return result

    monkeypatch.setattr(binding, "_decide_binding", overtaken)
    scale()
    monkeypatch.undo()
    assert scale().op_class is fast_scale


def test_equal_priorities_are_an_error_that_names_both_and_the_setting(scale) -> None:
    """Two replacements of one target need a choice; a higher priority, a provider or unregistering makes it."""
    one = scale.register_oot(
        type("One", (scale,), {"forward_oot": lambda self, x, bias=None: x + 1})
    )
    two = scale.register_oot(
        type("Two", (scale,), {"forward_oot": lambda self, x, bias=None: x + 2})
    )
    with pytest.raises(ConflictError, match=r"One.* and Two.*register_oot\(priority"):
        scale()
    CustomOp.unregister_oot(one)
    assert scale().op_class is two


def test_the_higher_priority_wins_whatever_the_order(scale) -> None:
    """Priority ranks replacements, and the loser stays in the decision with the reason."""
    high = scale.register_oot(priority=2)(
        type("High", (scale,), {"forward_oot": lambda self, x, bias=None: x})
    )
    scale.register_oot(type("Low", (scale,), {"forward_oot": lambda self, x, bias=None: x}))
    op = scale()
    assert op.op_class is high
    assert "Low" in str(op.decision)
    assert "priority 0 is below 2" in str(op.decision)


def test_when_narrows_a_replacement(scale, fast_scale) -> None:
    """A false or failing condition leaves the replacement out, and the decision says which."""

    def broken(platform: opgraft.Platform) -> bool:
        raise RuntimeError("no driver")

    scale.register_oot(when=lambda platform: platform.name == "other")(fast_scale)
    assert scale().op_class is scale
    assert "when= condition is false" in str(scale().decision)
    CustomOp.unregister_oot(fast_scale)
    scale.register_oot(when=broken)(fast_scale)
    assert "no driver" in str(scale().decision)


def test_providers_chooses_by_name_and_rejects_names_that_do_not_apply(scale) -> None:
    """The provider setting decides a tie, can keep the op's own class, and must name something that is there."""
    for name in ("one", "two"):
        replacement = type(
            name.title(),
            (scale,),
            {"forward_oot": lambda self, x, bias=None: x, "__module__": name},
        )
        scale.register_oot(replacement)
    with set_config(OpgraftConfig(providers={"scale": "two"})):
        assert scale().op_class.__name__ == "Two"
    own = scale.__module__.partition(".")[0]
    with set_config(OpgraftConfig(providers={"scale": own})):
        assert scale().op_class is scale
    with (
        set_config(OpgraftConfig(providers={"scale": "twoo"})),
        pytest.raises(ConfigError, match=r"asks for 'twoo' for 'scale'.*did you mean 'two'"),
    ):
        scale()


def test_an_op_name_belongs_to_one_class(scale) -> None:
    """A second class under a name is an error that cites both places."""

    class Other(CustomOp):
        def forward_native(self, x):
            return x

    with pytest.raises(
        ConflictError,
        match=r"'scale' is registered twice.*scale.py:\d+.*test_registration.py:\d+",
    ):
        CustomOp.register("scale")(Other)


def test_register_wants_a_custom_op_with_a_definition() -> None:
    """What is no CustomOp, or could not run anywhere, is rejected when it is registered."""
    with pytest.raises(RegistrationError, match=r"no subclass of opgraft\.CustomOp"):
        CustomOp.register("x")(torch.nn.Linear)
    with pytest.raises(RegistrationError, match="registered by a name"):
        CustomOp.register(torch.nn.Linear)
    with pytest.raises(RegistrationError, match="defines neither forward_native nor forward"):
        CustomOp.register("x")(type("Empty", (CustomOp,), {}))


def test_an_ambiguous_class_name_must_be_qualified(scale) -> None:
    """Two ops whose classes share a bare name are told apart by their modules, never guessed."""
    twin = type(
        "Scale", (CustomOp,), {"forward_native": lambda self, x: x, "__module__": "elsewhere"}
    )
    twin.__qualname__ = "Scale"
    CustomOp.register("other_scale")(twin)
    with pytest.raises(ConflictError, match=r"ambiguous.*'elsewhere:Scale'"):
        CustomOp.register_oot("Scale")(type("R", (twin,), {"forward_oot": lambda self, x: x}))
    replacement = CustomOp.register_oot("elsewhere:Scale")(
        type("R", (twin,), {"forward_oot": lambda self, x: x})
    )
    assert twin().op_class is replacement
    assert scale().op_class is scale


def test_reset_forgets_activation_and_keeps_declarations(scale, fast_scale) -> None:
    """After reset the replacement is known and inactive; registering it again makes it apply again."""
    scale.register_oot(fast_scale)
    assert scale().op_class is fast_scale
    opgraft.reset()
    assert scale().op_class is scale
    assert fast_scale in [replacement.cls for replacement in host_state().registry.replacements]
    scale.register_oot(fast_scale)
    assert scale().op_class is fast_scale


def test_code_without_a_name_registers(scale) -> None:
    """A class that a program executes without a module is registered as any other."""
    source = "@target.register_oot()\nclass Made(target):\n    forward_oot = kernel\n"
    names = {"target": scale, "kernel": kernel}
    exec(source, names)  # noqa: S102
    assert scale().op_class is names["Made"]


UNAPPLIED = (
    "from opgraft.ops import NewGELU, SiLU\nplatforms = 'any'\nSiLU.register_oot(priority=2)\n"
)
APPLIED = "@NewGELU.register_oot()\nclass Made(NewGELU): forward_oot = NewGELU.forward_native\n"


def test_a_decorator_without_a_class_is_told_while_its_plugin_runs(site) -> None:
    """The finding goes with a plugin that is left out, and comes back; an applied decorator has none."""
    site.plugin("acme", UNAPPLIED + APPLIED)
    for disabled in ((), ("acme",), ()):
        opgraft.reset()
        with set_config(OpgraftConfig(plugins_disable=disabled)):
            load_plugins()
            places = [str(each.location) for each in unapplied_registrations()]
        ours = [place for place in places if place.startswith(str(site.folder))]
        assert ours == ([] if disabled else [f"{site.folder / 'acme.py'}:3"])


def test_a_decorator_without_a_class_of_a_plugin_that_fails(site) -> None:
    """The finding is about plugins that run: another one fails for a reason of its own."""
    site.plugin("acme", f"{UNAPPLIED}raise OSError('no device')\n")
    load_plugins()
    places = [each.location for each in unapplied_registrations()]
    assert f"{site.folder / 'acme.py'}:3" not in places
