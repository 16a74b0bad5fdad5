"""What an op and the module in whose place it stands have in common, and what each keeps."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from opgraft import Adapter, LeaveAlone, Provider, graft, load_plugins, ungraft
from opgraft.errors import ConfigError
from opgraft.ops import Linear
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from torch import nn


def add(*adapters: Adapter) -> None:
    load_plugins()
    PLUGIN_ADAPTERS.get().extend((Provider("acme-npu", "2.0"), adapter) for adapter in adapters)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


class Norm(nn.Module):
    """Llama's norm, with attributes that a parent may read."""

    kind = "rms"

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.width = width
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms(hidden_states, self.weight, self.variance_epsilon)


def test_a_weight_that_was_exchanged_is_freed(mlp) -> None:
    """After loading by assignment nothing keeps the former weights, neither of modules nor of nested composites."""
    model = mlp()
    graft(model)
    former = [weakref.ref(parameter) for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert [ref() for ref in former] == [None] * len(former)
    weight = model[1].weight
    ungraft(model)
    assert model[1].weight is weight


class Doubled(nn.Module):
    """A composite with a table of its own and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table = nn.Buffer(torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 2 * self.inner(x) * self.table
        return out


class FastDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(4, 4)
        self.factor = nn.Buffer(torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.factor
        return out


def recognise_doubled(module: nn.Module) -> Mapping[str, Any] | None:
    return {} if type(module) is Doubled else None


def test_a_composite_gives_up_its_weights_too() -> None:
    """An exchanged weight is freed although a composite stands in for modules that were ops themselves."""
    add(Adapter("doubled", FastDoubled, recognise_doubled))
    composite = Doubled()
    linear, model, x = composite.inner, nn.Sequential(composite), torch.randn(3, 4)
    graft(model)
    former = weakref.ref(model[0].inner.weight)
    model.load_state_dict(
        {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}, assign=True
    )
    assert former() is None
    expected = model(x)
    model.double()
    assert composite.table.dtype == torch.float64, "a buffer that only the module has moves along"
    ungraft(model.float())
    assert model[0] is composite
    assert composite.inner is linear
    assert list(composite.state_dict()) == ["inner.weight", "inner.bias"]
    assert dict(composite.named_buffers()).keys() == {"table"}
    torch.testing.assert_close(model(x), expected)


def test_other_holders_of_a_module_see_the_weights_of_the_op(x) -> None:
    """A module that is also held elsewhere computes on, with what was loaded into the op."""
    linear = nn.Linear(16, 4)
    model, other = nn.Sequential(linear), nn.Sequential(linear)
    graft(model)
    model.load_state_dict({"0.weight": torch.ones(4, 16), "0.bias": torch.zeros(4)}, assign=True)
    assert torch.equal(other(x), model(x))
    ungraft(model)
    assert model[0] is linear
    assert torch.equal(other(x), model(x))


def test_an_op_outlives_its_module(mlp, x) -> None:
    """An op that is held after ungraft keeps its tensors, and what is done to them then is its own affair."""
    model = mlp()
    graft(model)
    op = model[1]
    ungraft(model)
    op.weight = nn.Parameter(torch.zeros_like(op.weight))
    assert model[1].weight.any()


def test_an_error_halfway_gives_the_tensors_back(mlp, x) -> None:
    """If grafting raises, each module has dictionaries of its own again, with the same parameters, and no op's."""
    model = mlp()
    tensors, expected = dict(model.named_parameters()), model(x)
    seen: list[nn.Module] = []

    class Watched(Linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(self)

    class Unusable(nn.Module):
        def __init__(self) -> None:
            raise ConfigError("a setting that cannot be used")

    def biased(module: nn.Module) -> Mapping[str, Any] | None:
        if type(module) is not nn.Linear or module.bias is None:
            return None
        return {"in_features": module.in_features, "out_features": module.out_features}

    add(Adapter("acme", Watched, biased))
    add(Adapter("acme", Unusable, lambda module: {} if isinstance(module, nn.RMSNorm) else None))
    with pytest.raises(ConfigError, match="cannot be used"):
        graft(model)
    assert seen
    assert all(tensors[name] is tensor for name, tensor in model.named_parameters())
    assert all(op._parameters is not model[1]._parameters for op in seen)
    assert torch.equal(model(x), expected)


def test_no_cycle_keeps_a_grafted_model(mlp) -> None:
    """The weights of a grafted model go when the last reference goes, without the garbage collector."""
    model = mlp()
    graft(model)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.disable()
    try:
        del model
        assert not [ref for ref in weights if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])  # noqa: S301
def test_a_copy_shares_its_own_tensors(mlp, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """In a copy, op and module share the copy's tensors: an exchanged weight is freed there too."""
    model = mlp()
    graft(model)
    copied = duplicate(model)
    former = weakref.ref(copied[1].weight)  # type: ignore[index]
    copied[1].weight = nn.Parameter(torch.zeros(32, 16))  # type: ignore[index]
    assert former() is None
    assert model[1].weight.any()
    ungraft(copied)
    assert not copied[1].weight.any()  # type: ignore[index]


def test_attributes_of_the_module_are_read_from_the_op() -> None:
    """A parent that reads a norm's attributes, its class's included, finds them on the op."""
    model = nn.Sequential(Norm(), nn.RMSNorm(8), nn.RMSNorm(8, eps=1e-3, elementwise_affine=False))
    graft(model)
    assert (model[0].kind, model[0].width, model[0].variance_epsilon, model[0].eps) == (
        "rms",
        8,
        1e-5,
        1e-5,
    )
    assert (model[1].normalized_shape, model[1].elementwise_affine) == ((8,), True)
    assert (model[2].normalized_shape, model[2].eps, model[2].elementwise_affine) == (
        (8,),
        1e-3,
        False,
    )
    x = torch.randn(3, 8)
    expected = F.rms_norm(x, model[1].normalized_shape, model[1].weight, model[1].eps)
    torch.testing.assert_close(model[1](x), expected)


@pytest.mark.parametrize(
    ("module", "name"), [(nn.RMSNorm(8, eps=1e-6), "eps"), (Norm(), "variance_epsilon")]
)
def test_eps_can_be_set_while_grafted(module: nn.Module, name: str) -> None:
    """Setting eps under the module's own name changes what the op computes, and the module has it afterwards."""
    model, x = nn.Sequential(module), torch.randn(3, 8)
    graft(model)
    setattr(model[0], name, 1.0)
    grafted = model(x)
    ungraft(model)
    assert getattr(module, name) == 1.0
    torch.testing.assert_close(grafted, model(x))


class WithResidual(Norm):
    def with_residual(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x + residual)


class WithProperty(Norm):
    @property
    def dim(self) -> int:
        return self.width


class WithOwnLoading(Norm):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


class WithOwnCall(nn.Module):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * F.silu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class WithHelpers(Norm):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return "llama"

    def _helper(self) -> None:
        return None


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (WithResidual, "with_residual"),
        (WithProperty, "dim"),
        (WithOwnLoading, "_load_from_state_dict"),
        (WithOwnCall, "__call__"),
    ],
)
def test_a_class_with_more_than_its_forward_stays(cls: type[nn.Module], names: str) -> None:
    """What other code may call or read, or what replaces nn.Module's own methods, would be missing from the op."""
    model = nn.Sequential(cls())
    (row,) = graft(model).left_alone
    assert type(model[0]) is cls
    assert (
        row.reason == f"its class defines more than its forward, which an op does not have: {names}"
    )


def test_helpers_and_representations_do_not_matter() -> None:
    """Private helpers, extra_repr and reset_parameters keep no class from being recognised."""
    assert len(graft(nn.Sequential(WithHelpers())).replaced) == 1


class CastLast(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        return (self.weight * x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5)).to(
            hidden_states.dtype
        )


def mixed(norm: nn.Module, weight: torch.dtype, rest: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8).to(rest), norm.to(weight))


def test_a_norm_that_promotes_stays_in_a_model_of_another_dtype() -> None:
    """A float32 norm in a bfloat16 model returns float32 before and after; one of the model's dtype is replaced."""
    x = torch.randn(3, 8)
    model = mixed(Norm(), torch.float32, torch.bfloat16)
    before = model(x.bfloat16())
    report = graft(model)
    assert before.dtype == torch.float32
    assert torch.equal(model(x.bfloat16()), before)
    (row,) = report.left_alone
    assert row.reason.startswith(
        "its weight is torch.float32 in a model of torch.bfloat16: the op would return another"
    )
    assert len(graft(mixed(Norm(), torch.bfloat16, torch.bfloat16)).replaced) == 2


def test_a_norm_that_casts_last_is_replaced_in_a_model_of_another_dtype() -> None:
    """Where the result has the input's dtype whatever the weight's is, so it has from the op."""
    x = torch.randn(3, 8).bfloat16()
    model = mixed(CastLast(), torch.float32, torch.bfloat16)
    before = model(x)
    assert len(graft(model).replaced) == 2
    assert before.dtype == torch.bfloat16
    torch.testing.assert_close(model(x), before)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [torch.float32, torch.bfloat16])
def test_torchs_rms_norm_keeps_its_dtype(weight: torch.dtype, rest: torch.dtype) -> None:
    """Whatever this version of torch makes of two dtypes, the grafted model returns the same."""
    model = mixed(nn.RMSNorm(8, eps=1e-5), weight, rest)
    x = torch.randn(3, 8, dtype=rest)
    before = model(x)
    graft(model)
    torch.testing.assert_close(model(x), before)


def test_a_weight_narrower_than_the_models_dtype_stays() -> None:
    """The op would round to a bfloat16 weight's dtype what the norm computes in the model's float32."""
    model = mixed(Norm(), torch.bfloat16, torch.float32)
    x = torch.randn(3, 8)
    before = model(x)
    graft(model)
    assert torch.equal(model(x), before)


def test_a_grafted_model_of_torch_modules_is_traced(x) -> None:
    """Symbolic tracing goes through the drop-in ops of a grafted model."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.SiLU())
    graft(model)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_a_refused_op_takes_nothing(x) -> None:
    """Where an op does not fit, or its adapter refuses late, the module's dictionaries stay its own."""
    linear = nn.Linear(16, 4)
    parameters = linear._parameters

    def refuse(module: nn.Module) -> Mapping[str, Any] | None:
        if isinstance(module, nn.Linear):
            raise LeaveAlone("not today")
        return None

    add(Adapter("acme", Linear, refuse))
    graft(nn.Sequential(linear))
    assert linear._parameters is parameters
    assert linear(x).shape == (4, 5, 4)
