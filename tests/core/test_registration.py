"""Declaring ops and replacements: forms, checks, pending targets, priorities, undo."""

from __future__ import annotations

from collections.abc import Callable

import opgraft
import pytest
import torch
from opgraft import CustomOp, OpgraftConfig, PluggableLayer, maybe_get_oot_by_class, set_config
from opgraft.errors import ConflictError, RegistrationError, UnknownTargetError
from opgraft.state import host_state

FORMS: dict[str, Callable] = {
    "by class name": lambda target, cls: CustomOp.register_oot("Scale")(cls),
    "by op name": lambda target, cls: CustomOp.register_oot("scale")(cls),
    "by module and class": lambda target, cls: CustomOp.register_oot(f"{target.__module__}:Scale")(cls),
    "by keyword": lambda target, cls: CustomOp.register_oot(name="Scale")(cls),
    "by class": lambda target, cls: CustomOp.register_oot(target)(cls),
    "bare on the target": lambda target, cls: target.register_oot(cls),
    "called on the target": lambda target, cls: target.register_oot()(cls),
    "by call": lambda target, cls: CustomOp.register_oot(_decorated_op_cls=cls, name="Scale"),
    "on the layer base": lambda target, cls: PluggableLayer.register_oot("Scale")(cls),
    "in a loop": lambda target, cls: [CustomOp.register_oot(_decorated_op_cls=c, name=n) for n, c in [("Scale", cls)]][
        -1
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_register_oot_replaces_and_returns_the_class(form: str, scale, fast_scale) -> None:
    """Each documented form declares the replacement and hands the class back."""
    assert FORMS[form](scale, fast_scale) is fast_scale
    op = scale()
    assert op.op_class is fast_scale
    assert isinstance(op, scale)
    assert CustomOp.op_registry_oot["Scale"] is fast_scale
    assert maybe_get_oot_by_class(scale) is fast_scale


def test_a_call_without_a_name_means_the_class_of_that_name(scale) -> None:
    """register_oot(_decorated_op_cls=C) alone replaces the op whose class is called like C."""
    replacement = type("Scale", (scale,), {"__qualname__": "Scale", "__module__": "elsewhere"})
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

    with pytest.raises(RegistrationError, match=r"Unrelated at .*test_registration.py:\d+.*not a subclass"):
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
def test_a_narrower_method_is_rejected(scale, method: str, function: Callable, message: str) -> None:
    """Constructor, forward and kernels must take every call that the target's take."""
    replacement = type("Narrow", (scale,), {method: function})
    with pytest.raises(RegistrationError, match=rf"Narrow.{method}.*narrower than Scale.*{message}"):
        scale.register_oot(replacement)


def test_an_unknown_target_is_pending_until_loading_ends_then_an_error(scale, fast_scale) -> None:
    """A name may be declared before its target; when plugins are loaded it must exist, with near matches shown."""
    CustomOp.register_oot("Scael")(fast_scale)
    with pytest.raises(UnknownTargetError, match=r"replaces 'Scael'.*did you mean 'Scale' or 'scale'"):
        scale()


def test_an_unknown_target_after_loading_is_an_error_at_once(scale, fast_scale) -> None:
    """Once plugins are loaded nothing can be pending any more."""
    scale()
    with pytest.raises(UnknownTargetError, match="Scael"):
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


def test_a_reloaded_definition_supersedes_the_old_one(scale) -> None:
    """Running a notebook cell or reloading a module again is no conflict: the newer class counts."""

    def define(value: int):
        class Reloaded(scale):
            def forward_oot(self, x, bias=None):
                return x + value

        return scale.register_oot(Reloaded)

    define(1)
    define(2)
    assert scale()(torch.zeros(1)) == 2
    assert len(host_state().active) == 1


def test_equal_priorities_are_an_error_that_names_both_and_the_setting(scale) -> None:
    """Two replacements of one target need a choice; a higher priority, a provider or unregistering makes it."""
    one = scale.register_oot(type("One", (scale,), {"forward_oot": lambda self, x, bias=None: x + 1}))
    two = scale.register_oot(type("Two", (scale,), {"forward_oot": lambda self, x, bias=None: x + 2}))
    with pytest.raises(ConflictError, match=r"One.* and Two.*providers=\{'scale'.*OPGRAFT_PLUGINS_DISABLE"):
        scale()
    CustomOp.unregister_oot(one)
    assert scale().op_class is two


def test_the_higher_priority_wins_whatever_the_order(scale) -> None:
    """Priority ranks replacements, and the loser stays in the decision with the reason."""
    high = scale.register_oot(priority=2)(type("High", (scale,), {"forward_oot": lambda self, x, bias=None: x}))
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
        replacement = type(name.title(), (scale,), {"forward_oot": lambda self, x, bias=None: x, "__module__": name})
        scale.register_oot(replacement)
    with set_config(OpgraftConfig(providers={"scale": "two"})):
        assert scale().op_class.__name__ == "Two"
    own = scale.__module__.partition(".")[0]
    with set_config(OpgraftConfig(providers={"scale": own})):
        assert scale().op_class is scale
    with (
        set_config(OpgraftConfig(providers={"scale": "three"})),
        pytest.raises(ConflictError, match="asks for 'three' for 'scale'"),
    ):
        scale()


def test_an_op_name_belongs_to_one_class(scale) -> None:
    """A second class under a name is an error that cites both places."""

    class Other(CustomOp):
        def forward_native(self, x):
            return x

    with pytest.raises(ConflictError, match=r"'scale' is registered twice.*conftest.py:\d+.*test_registration.py:\d+"):
        CustomOp.register("scale")(Other)


def test_register_wants_a_custom_op_with_a_definition() -> None:
    """What is no CustomOp, or could not run anywhere, is rejected when it is registered."""
    with pytest.raises(RegistrationError, match=r"no subclass of opgraft\.CustomOp"):
        CustomOp.register("x")(torch.nn.Linear)
    with pytest.raises(RegistrationError, match="defines neither forward_native nor forward"):
        CustomOp.register("x")(type("Empty", (CustomOp,), {}))


def test_an_ambiguous_class_name_must_be_qualified(scale) -> None:
    """Two ops whose classes share a bare name are told apart by their modules, never guessed."""
    twin = type("Scale", (CustomOp,), {"forward_native": lambda self, x: x, "__module__": "elsewhere"})
    twin.__qualname__ = "Scale"
    CustomOp.register("other_scale")(twin)
    with pytest.raises(ConflictError, match=r"ambiguous.*'elsewhere:Scale'"):
        CustomOp.register_oot("Scale")(type("R", (twin,), {}))
    replacement = CustomOp.register_oot("elsewhere:Scale")(type("R", (twin,), {}))
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
