"""Linear layers side by side in memory, in a gated MLP: whatever is done to its weights, it computes with them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import opgraft
import pytest
import torch
import torch.nn.functional as F
from opgraft import graft, inference_only, ungraft
from opgraft.ops import CustomOp, GatedMLP, Linear
from torch import nn
from torch.nn.utils import parametrize


class Gated(nn.Module):
    """A gated MLP as Llama writes it."""

    def __init__(
        self, act: nn.Module | None = None, bias: bool = False, width: int = 16, inner: int = 24
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = act if act is not None else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def grafted(module: nn.Module | None = None) -> tuple[nn.Sequential, torch.Tensor]:
    """A grafted model of one gated MLP and an input."""
    model = nn.Sequential(module if module is not None else Gated()).eval()
    report = graft(model)
    assert [row.op for row in report.replaced] == ["gated_mlp"]
    return model, torch.randn(3, 5, 16)


def joint(model: nn.Sequential, x: torch.Tensor) -> bool:
    """Whether one kernel call computes gate and up."""
    layer = model[0]
    assert isinstance(layer, GatedMLP)
    with torch.no_grad():
        return layer.joint_op(x) is not None


def agrees(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved],  # noqa: S301
)
def test_copies_share_a_storage_of_their_own(duplicate: Callable[[Any], Any]) -> None:
    """A copy computes gate and up at once too, from its own weights."""
    model, x = grafted()
    copied = duplicate(model)
    assert joint(copied, x)
    expected = model(x)
    with torch.no_grad():
        copied[0].up_proj.weight.zero_()
        assert not copied(x).any()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_loading(assign: bool) -> None:
    """Loaded weights are what is computed with, and lie in one storage again; the former ones are freed."""
    model, x = grafted()
    other = Gated()
    former = [weakref.ref(parameter) for parameter in model.parameters()]
    model.load_state_dict(
        {f"0.{name}": value for name, value in other.state_dict().items()}, assign=assign
    )
    assert joint(model, x)
    agrees(model, other, x)
    assert [ref() is None for ref in former] == [assign] * 3


def test_moving_and_casting() -> None:
    """After a change of dtype and back, or a detour over no memory, gate and up share a storage again."""
    module = Gated()
    plain = copy.deepcopy(module)
    model, x = grafted(module)
    model.double()
    assert joint(model, x.double())
    agrees(model, copy.deepcopy(plain).double(), x.double())
    model.to("meta")
    model.load_state_dict(
        {f"0.{name}": value for name, value in plain.state_dict().items()}, assign=True
    )
    assert joint(model, x)
    agrees(model, plain, x)


def assign_data(layer: GatedMLP) -> None:
    layer.up_proj.weight.data = torch.zeros(24, 16)


def assign_parameter(layer: GatedMLP) -> None:
    layer.up_proj.weight = nn.Parameter(torch.zeros(24, 16))


def exchange_child(layer: GatedMLP) -> None:
    layer.up_proj = nn.Linear(16, 24, bias=False)
    nn.init.zeros_(layer.up_proj.weight)


def add_hook(layer: GatedMLP) -> None:
    layer.up_proj.register_forward_hook(lambda module, args, out: torch.zeros_like(out))


def swap_tensors(layer: GatedMLP) -> None:
    torch.utils.swap_tensors(layer.up_proj.weight, nn.Parameter(torch.zeros(24, 16)))


def set_forward(layer: GatedMLP) -> None:
    layer.up_proj.forward = lambda x: torch.zeros(*x.shape[:-1], 24)  # type: ignore[method-assign]


class Zero(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0 * weight


def parametrize_up(layer: GatedMLP) -> None:
    parametrize.register_parametrization(layer.up_proj, "weight", Zero())


@pytest.mark.parametrize(
    "change",
    [
        assign_data,
        assign_parameter,
        swap_tensors,
        exchange_child,
        add_hook,
        set_forward,
        parametrize_up,
    ],
)
def test_what_separates_them_is_seen_at_once(change: Callable[[GatedMLP], None]) -> None:
    """Assigned weights, adapters in the place of a child, hooks: the next call does what the children would."""
    model, x = grafted()
    assert model(x).any()
    change(model[0])
    assert not joint(model, x)
    with torch.no_grad():
        assert not model(x).any()


@pytest.mark.parametrize("frozen", [True, False])
def test_swapping_every_tensor(frozen: bool) -> None:
    """After inference, torch may swap the tensors of a grafted model, as ``.to()`` does where it is told to."""
    model, x = grafted()
    if frozen:
        opgraft.freeze(model)
    with torch.no_grad():
        model(x)
    other = Gated()
    for mine, theirs in zip(model[0].named_parameters(), list(other.parameters()), strict=True):
        torch.utils.swap_tensors(mine[1], theirs)
    plain = Gated()
    plain.load_state_dict(model[0].state_dict())
    agrees(model, plain, x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    agrees(model, plain.double(), x.double())


def test_functional_call_uses_what_it_is_given() -> None:
    """Weights that are swapped in for one call are computed with, and the layer is as before after it."""
    model, x = grafted()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        assert not torch.func.functional_call(model, zeros, x).any()
        assert model(x).any()
    assert joint(model, x)


def test_kernels_that_keep_packed_weights_see_every_step() -> None:
    """An optimizer step on gate or up alone moves the version of the joint weight, by which kernels keep copies."""

    @CustomOp.register_oot("Linear")
    class Packing(Linear):
        packed: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}

        @inference_only
        def forward_oot(
            self, input: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor:
            key = (self.weight.data_ptr(), self.weight._version)
            if key not in self.packed:
                self.packed.clear()
                self.packed[key] = self.weight.detach().clone()
            return F.linear(input, self.packed[key], self.bias)

    module = Gated()
    model, x = grafted(module)
    for parameters in (
        [module.up_proj.weight],
        [module.gate_proj.weight],
        list(module.parameters()),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        model(x).square().sum().backward()
        optimizer.step()
        assert joint(model, x)
        plain = Gated()
        plain.load_state_dict(model[0].state_dict())
        agrees(model, plain, x)


def test_training_step_is_the_same() -> None:
    """With gradients the children are called one by one: loss, gradients and weights are bit for bit the same."""
    torch.manual_seed(0)
    plain = nn.Sequential(Gated())
    model = copy.deepcopy(plain)
    graft(model)
    x = torch.randn(3, 16)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert joint(model, x)


def test_tied_weights_are_seen_by_both_holders() -> None:
    """A weight that is tied to another module moves for both; gate and up of one weight are called one by one."""
    module = Gated()
    head = nn.Linear(16, 24, bias=False)
    head.weight = module.up_proj.weight
    model, x = nn.Sequential(module, nn.Identity()), torch.randn(2, 16)
    graft(model)
    with torch.no_grad():
        head.weight.zero_()
        assert not model(x).any()
    twins = Gated()
    twins.up_proj.weight = twins.gate_proj.weight
    plain = copy.deepcopy(twins)
    model, x = grafted(twins)
    assert not joint(model, x)
    agrees(model, plain, x)


def test_inference_mode_and_shared_memory() -> None:
    """Grafting in inference mode leaves trainable parameters; memory that other processes hold stays where it is."""
    model, x = nn.Sequential(Gated()), torch.randn(2, 16)
    with torch.inference_mode():
        graft(model)
    model(x).sum().backward()
    with torch.inference_mode():
        assert joint(model, x)
    shared = Gated().share_memory()
    address = shared.up_proj.weight.data_ptr()
    model, x = grafted(shared)
    assert shared.up_proj.weight.data_ptr() == address
    assert not joint(model, x)


def test_no_cycle_and_no_second_copy() -> None:
    """The weights go when the last reference goes, and while grafted they are in memory once."""
    model, _ = grafted()
    layer = model[0]
    op = layer.__dict__["_joint"].op
    assert op.weight.data_ptr() == layer.gate_proj.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == 3 * 16 * 24
    ref = weakref.ref(op.weight)
    gc.disable()
    try:
        del model, layer, op
        assert ref() is None
    finally:
        gc.enable()


def from_buffer(*order: str) -> tuple[Gated, torch.Tensor]:
    """A module whose weights are views of one flat buffer, in an order, and the buffer."""
    module = Gated()
    children = [module.get_submodule(name) for name in order]
    buffer = torch.randn(3 * 16 * 24)
    for child, part in zip(children, buffer.split(16 * 24), strict=True):
        child.weight = nn.Parameter(part.view_as(child.weight))
    return module, buffer


IN_BUFFER = [("gate_proj", "down_proj", "up_proj"), ("up_proj", "gate_proj", "down_proj")]


@pytest.mark.parametrize(
    ("order", "at_once"),
    [*((order, False) for order in IN_BUFFER), (("down_proj", "gate_proj", "up_proj"), True)],
)
def test_a_flat_buffer_keeps_its_weights(order: tuple[str, ...], at_once: bool) -> None:
    """What is written to a buffer that holds the weights is computed with, while grafted and after ungraft.

    Gate and up are computed at once where they lie in it one after the other.
    """
    module, buffer = from_buffer(*order)
    model, x = grafted(module)
    assert joint(model, x) == at_once
    model.load_state_dict(model.state_dict())
    plain = Gated()
    with torch.no_grad():
        for stage in (lambda _: None, lambda m: m.float(), ungraft):
            stage(model)
            buffer.normal_()
            state = zip(order, buffer.split(16 * 24), strict=True)
            plain.load_state_dict(
                {f"{n}.weight": t.view_as(plain.get_submodule(n).weight) for n, t in state}
            )
            agrees(model, plain, x)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved],  # noqa: S301
)
def test_copies_are_separated_too(duplicate: Callable[[Any], Any]) -> None:
    """Ungrafting a copy of a grafted model gives each weight a storage of its own, as ungrafting the model does."""
    model, x = grafted()
    copied = duplicate(model)
    for each in (copied, model):
        assert joint(each, x)
        ungraft(each)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in each.parameters())


def test_a_partly_assigned_layer_is_joined_again() -> None:
    """A weight that was left in the layer's own storage may be moved once more, to the new one beside it."""
    model, x = grafted()
    model[0].up_proj.weight = nn.Parameter(torch.zeros(24, 16))
    assert not joint(model, x)
    model[0].join()
    assert joint(model, x)
    with torch.no_grad():
        assert not model(x).any()
    ungraft(model)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_what_shares_memory_from_before_grafting() -> None:
    """A tensor over a weight's memory that was taken before keeps the former memory, as across a change of dtype."""
    module = Gated()
    weight = module.gate_proj.weight
    former, before = weight.detach(), weight.detach().clone()
    model, _ = grafted(module)
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(former, before)
    ungraft(model)
    assert not weight.any()
    assert torch.equal(former, before)


def test_weights_frozen_after_grafting() -> None:
    """Of weights that require no gradient any more, gate and up are computed at once, and no result requires one."""
    model, x = grafted()
    assert model(x).requires_grad
    model.requires_grad_(False)
    assert model[0].joint_op(x) is not None
    assert not model(x).requires_grad
    model[0].up_proj.weight.requires_grad_(True)
    model(x).sum().backward()
    assert model[0].up_proj.weight.grad is not None


def test_another_parameter_over_the_same_memory() -> None:
    """Its version counts from zero: after as many writes as the old one had seen, packed copies are still renewed."""
    layer = GatedMLP(512, 1024).eval().requires_grad_(False)
    layer.join()
    x = torch.randn(8, 512)

    def expected() -> torch.Tensor:
        out: torch.Tensor = layer.down_proj(
            F.silu(F.linear(x, layer.gate_proj.weight)) * layer.up_proj(x)
        )
        return out

    for _ in range(4):
        layer.gate_proj.weight.mul_(1.0)
    torch.testing.assert_close(layer(x), expected())
    layer.gate_proj.weight = nn.Parameter(layer.gate_proj.weight.data, requires_grad=False)
    for _ in range(8):
        layer.gate_proj.weight.mul_(1.1)
        torch.testing.assert_close(layer(x), expected())
    layer.join()
    assert layer.joint_op(x) is not None
    for _ in range(3):
        layer.gate_proj.weight.mul_(1.1)
        torch.testing.assert_close(layer(x), expected())
