"""Methods that follow from the functional forms that a class declares."""

from __future__ import annotations

import inspect
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CustomOp, FunctionalKernels, functional, ops
from opgraft.binding.derivation import NATIVE
from opgraft.errors import MissingKernelError, RegistrationError
from opgraft.registry.state import host_state
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor


def doubled(*args: Any, **kwargs: Any) -> Any:
    """Twice the native norm, so that a result tells who computed it."""
    return 2 * NATIVE.rms_norm(*args, **kwargs)


def test_a_declared_kernel_runs_as_module_and_as_function() -> None:
    """One mapping gives a replacement its method, and the functional form its kernel; nothing else is written."""

    class Doubled(ops.RMSNorm):
        functional_oot = FunctionalKernels({"rms_norm": doubled})

    CustomOp.register_oot(Doubled, name="RMSNorm")
    x, norm = torch.randn(3, 8), ops.RMSNorm(8)
    expected = 2 * NATIVE.rms_norm(x, norm.weight, norm.variance_epsilon)
    assert norm.decision.chosen == f"{Doubled.__qualname__}.forward_oot"
    assert torch.equal(norm(x), expected)
    assert torch.equal(functional.rms_norm(x, norm.weight, norm.variance_epsilon), expected)


def test_a_form_without_a_kernel_runs_natively() -> None:
    """With a residual the op calls another form, of which the mapping has no kernel."""

    class Doubled(ops.RMSNorm):
        functional_oot = FunctionalKernels({"rms_norm": doubled})

    CustomOp.register_oot(Doubled, name="RMSNorm")
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    norm = ops.RMSNorm(8)
    assert torch.equal(norm(x, residual)[0], norm.forward_native(x, residual)[0])


def test_kernels_say_what_they_need_and_whether_they_have_a_backward() -> None:
    """The marks of a mapping are those of the method: what is missing is a reason, a gradient runs natively."""
    missing: list[str] = ["no such device"]

    class Doubled(ops.RMSNorm):
        functional_oot = FunctionalKernels(
            {"rms_norm": doubled},
            needs=lambda: missing[0] if missing else None,
            inference_only=True,
        )

    CustomOp.register_oot(Doubled, name="RMSNorm")
    assert "no such device" in str(ops.RMSNorm(8).decision)
    missing.clear()
    opgraft.reset()
    CustomOp.register_oot(Doubled, name="RMSNorm")
    norm, x = ops.RMSNorm(8), torch.randn(3, 8)
    assert torch.equal(norm(x), norm.forward_native(x))
    with torch.no_grad():
        assert torch.equal(norm(x), 2 * norm.forward_native(x))


def test_a_check_that_returns_no_reason_is_named() -> None:
    """A check that answers with a truth value is a mistake of its author: the kernel is passed over, and it is said."""

    class Doubled(ops.RMSNorm):
        functional_oot = FunctionalKernels({"rms_norm": doubled}, needs=lambda: True)  # type: ignore[arg-type, return-value]

    CustomOp.register_oot(Doubled, name="RMSNorm")
    assert (
        "needs() check raised TypeError: a value of type bool, expected a reason as str, or None"
        in str(ops.RMSNorm(8).decision)
    )


def test_a_static_definition_gives_a_method() -> None:
    """``SiluAndMul.forward_native`` is static, as in vLLM; a kernel derived from it is called like any method."""

    class Negated(ops.SiluAndMul):
        functional_oot = FunctionalKernels(
            {"silu_and_mul": lambda x: -NATIVE.silu_and_mul(x)}, inference_only=True
        )

    CustomOp.register_oot(Negated, name="SiluAndMul")
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(ops.SiluAndMul()(x), -ops.SiluAndMul.forward_native(x))


def test_the_parameter_is_no_part_of_the_call() -> None:
    """Signatures show what callers may pass; replacements are held against those."""
    expected = ["self", "x", "residual"]
    assert list(inspect.signature(ops.RMSNorm.forward_native).parameters) == expected
    assert list(inspect.signature(ops.RMSNorm.forward_cuda).parameters) == expected


def test_a_derived_method_cites_the_class_that_declares_it() -> None:
    """The place of a derived kernel is its class, not the native definition that it was derived from."""

    class Doubled(ops.RMSNorm):
        functional_oot = FunctionalKernels({"rms_norm": doubled})

    CustomOp.register_oot(Doubled, name="RMSNorm")
    winner = ops.RMSNorm(8).decision.candidates[0]
    assert winner.location is not None
    assert winner.location.startswith(__file__)


def test_a_definition_that_cannot_take_kernels_is_an_error() -> None:
    """A class whose ``forward_native`` does not take ``functional`` must define the method itself."""
    with pytest.raises(
        RegistrationError, match=r"declares functional_oot, but its forward_native does not take"
    ):

        class Own(CustomOp):
            functional_oot = FunctionalKernels({"rms_norm": doubled})

            def forward_native(self, x: Tensor) -> Tensor:
                return x


@pytest.mark.parametrize("table", [doubled, 3, ["rms_norm"], "rms_norm", None], ids=type)
def test_kernels_that_are_no_mapping_are_an_error(table: object) -> None:
    """No form can be looked up in it, and the first call would say so instead of the class."""
    kind = type(table).__name__
    with pytest.raises(RegistrationError, match=rf"Own\.functional_oot at .* is of type {kind},"):
        type("Own", (ops.RMSNorm,), {"functional_oot": table})


def test_a_module_of_kernels_is_imported_when_one_is_asked_for() -> None:
    """Kernels given by the name of their module need not be importable until they run."""
    kernels = FunctionalKernels(
        "opgraft_nowhere.kernels", needs=lambda: "needs a package that is not there"
    )
    with pytest.raises(
        MissingKernelError, match=r"opgraft_nowhere\.kernels cannot run here: needs a package"
    ):
        kernels["rms_norm"]


def test_compiled_code_calls_derived_kernels() -> None:
    """A derived method is one plain function to a compiler: no graph break, the kernel's result."""

    class Doubled(ops.RMSNorm):
        functional_oot = FunctionalKernels({"rms_norm": doubled})

    CustomOp.register_oot(Doubled, name="RMSNorm")
    x, norm = torch.randn(3, 8), ops.RMSNorm(8)
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), norm(x))


def test_what_only_looks_like_a_declaration_is_left_alone() -> None:
    """An attribute that names no dispatch key is the author's own."""

    class Own(CustomOp):
        functional_helper = staticmethod(doubled)

        def forward_native(self, x: Tensor) -> Tensor:
            return x

    assert not hasattr(Own, "forward_helper")


@pytest.mark.parametrize("name", sorted(name for name, spec in SPECS.items() if spec.module))
def test_functions_alone_are_the_kernel_of_every_op(name: str) -> None:
    """For each op with a form, ``functional_oot`` is all that a replacement needs to bring."""
    spec, calls = SPECS[name], []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return spec.functional.native(*args, **kwargs)

    target: Any = host_state().registry.find_target(spec.functional.op)
    namespace = {"functional_oot": FunctionalKernels({name: counted})}
    target.register_oot(type(target)("Functional", (target,), namespace))
    variant = next(iter(spec.variants))
    given = spec.arguments(variant, spec.dtypes[0], spec.leads[0], spec.sizes[0])
    with torch.inference_mode():
        checks.by_module(spec)(**given)
    assert calls


class Sevens:
    """A helper that a plugin shares among its classes."""

    def _forward_sdpa(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.full_like(query, 7.0)


def test_a_helper_of_another_base_class_runs() -> None:
    """A replacement may inherit the helper that ``forward_native`` calls from a class of its own."""

    class MixedAttention(Sevens, ops.MMEncoderAttention):
        """Overrides one helper, by inheritance."""

    CustomOp.register_oot(MixedAttention, name="MMEncoderAttention")
    query = torch.randn(1, 3, 8)
    assert bool((ops.MMEncoderAttention(2, 4)(query, query, query) == 7.0).all())
