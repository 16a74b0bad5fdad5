"""Messages and decisions name things so that a reader can tell them apart, and finds them."""

from __future__ import annotations

import inspect

import pytest
from opgraft import CustomOp
from opgraft.errors import RegistrationError, close_matches


def test_a_narrower_method_is_told_from_the_line_of_the_method(scale) -> None:
    """The place beside the target's method is that of the method, inherited or not; of a class without one, its own."""

    class Wide(scale):
        """Inherits all."""

    CustomOp.register("wide_scale")(Wide)
    line = inspect.getsourcelines(scale.forward_native)[1]
    with pytest.raises(
        RegistrationError, match=rf"Wide\.forward_native at \S+scale\.py:{line}: the call"
    ):
        Wide.register_oot(type("Narrow", (Wide,), {"forward_oot": lambda self, x: x}))


def test_classes_of_one_name_are_told_apart(scale) -> None:
    """A replacement with the name of its target is shown with its module, and so is the target; others as they were."""
    replacement = type(
        "Scale", (scale,), {"forward_oot": lambda self, x, bias=None: x, "__module__": "acme.ops"}
    )
    replacement.__qualname__ = scale.__qualname__
    scale.register_oot(replacement)
    decision = scale(4).decision
    theirs, ours = f"acme.ops:{scale.__qualname__}", f"{scale.__module__}:{scale.__qualname__}"
    (chosen,) = [part for part in decision.parts if part.subject.startswith("class of")]
    assert [row.name for row in chosen.candidates] == [theirs, ours]
    assert (chosen.chosen, chosen.candidates[1].reason) == (theirs, f"replaced by {theirs}")
    assert decision.chosen == f"{theirs}.forward_oot"
    assert {row.name: row.reason for row in decision.candidates}[
        f"{ours}.forward_native"
    ] == f"{theirs} is more derived"


def test_near_names_are_not_padded_with_far_ones() -> None:
    """Only names about as near as the nearest are suggested, several where they are."""
    known = ["rms_norm", "rms_norm_gated", "gemma_rms_norm", "layer_norm"]
    assert close_matches("rmsnorm", known) == "did you mean 'rms_norm'?"
    assert (
        close_matches("quant_a", ["quant_b", "quant_c"]) == "did you mean 'quant_c' or 'quant_b'?"
    )
    many = close_matches("zzz", [f"op_{number:02}" for number in range(50)])
    assert many.startswith("known: op_00, op_01, ")
    assert many.endswith("op_39, and 10 more.")
