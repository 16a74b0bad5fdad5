"""Grafting models of torch's own modules."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft import graft, ungraft
from opgraft.errors import GraftError
from opgraft.ops import GELU, LayerNorm, Linear, RMSNorm, SiLU
from torch import nn
from torch.nn.utils import parametrizations, parametrize


def test_every_module_is_replaced_and_comes_back(mlp, x) -> None:
    """Outputs agree, parameters stay the same objects, and ungraft restores the very modules that were there."""
    model = mlp()
    modules, parameters, keys = list(model), list(model.parameters()), list(model.state_dict())
    expected = model(x)
    report = graft(model)
    assert [type(module).op_class for module in model[:6]] == [
        LayerNorm,
        Linear,
        GELU,
        Linear,
        RMSNorm,
        SiLU,
    ]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert not model[1].training
    assert len(report.replaced) == 6
    assert [(row.path, row.source, row.reason) for row in report.left_alone] == [
        ("6", "Dropout", "no adapter recognises it")
    ]
    ungraft(model)
    assert list(model) == modules
    assert torch.equal(model(x), expected)


def test_report_as_data_and_as_text(mlp) -> None:
    """The report names path, classes, implementation and provider, counts them, and fits a terminal."""
    report = graft(mlp())
    row = report.replaced[1]
    assert (row.path, row.source, row.adapter, row.op) == (
        "1",
        "Linear",
        "torch.nn.Linear",
        "linear",
    )
    assert row.implementation == "Linear.forward_cpu"
    assert row.provider.name == "opgraft"
    (linear, *_) = report.counts()
    assert (linear.op, linear.implementation, linear.provider, linear.count) == (
        "linear",
        row.implementation,
        row.provider,
        2,
    )
    data = json.loads(json.dumps(report.to_dict()))
    assert data["replaced"][1]["provider"]["name"] == "opgraft"
    assert data["left_alone"][0]["reason"] == "no adapter recognises it"
    text = str(report)
    assert text.startswith("6 modules replaced, 1 left alone")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_an_empty_report_and_the_model_itself(x) -> None:
    """A model that is itself a leaf is never replaced, and the report says so."""
    model = nn.Linear(16, 2)
    report = graft(model)
    assert type(model) is nn.Linear
    assert "no parent to be replaced in" in str(report)
    assert report.counts() == ()


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm((3, 8), eps=1e-2), (2, 3, 8)),
        (nn.LayerNorm(8, bias=False), (2, 8)),
        (nn.LayerNorm(8, elementwise_affine=False), (2, 8)),
        (nn.RMSNorm(8, eps=1e-2), (2, 8)),
        (nn.RMSNorm(8), (2, 8)),
        (nn.RMSNorm(8).double(), (2, 8)),
        (nn.RMSNorm(8, eps=1e-3, elementwise_affine=False), (2, 8)),
        (nn.Linear(8, 3, bias=False), (8,)),
        (nn.SiLU(inplace=True), (2, 8)),
        (nn.GELU(), (2, 8)),
    ],
    ids=str,
)
def test_arguments_of_torch_modules_reach_the_op(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Every option of torch's modules is kept, for small inputs where eps decides too."""
    model = nn.Sequential(module)
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    inputs = torch.randn(shape, dtype=dtype) * 1e-3
    expected = model(inputs.clone())
    (_,) = graft(model).replaced
    mine = inputs.clone()
    torch.testing.assert_close(model(mine), expected, atol=1e-5, rtol=0)
    assert isinstance(module, nn.SiLU) != torch.equal(mine, inputs), "in place means in place"


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_without_eps_takes_that_of_each_input(affine: bool) -> None:
    """torch chooses eps by the dtype of an input, and so does the op, also once the model has another dtype."""
    reference = nn.Sequential(nn.RMSNorm(64, elementwise_affine=affine))
    model = copy.deepcopy(reference)
    assert len(graft(model).replaced) == 1
    for dtype in DTYPES:
        model.to(dtype)
        inputs = (torch.randn(4, 64) * 1e-5).to(dtype)
        expected = reference.to(dtype)(inputs)
        torch.testing.assert_close(model(inputs), expected, atol=0, rtol=torch.finfo(dtype).eps * 4)


def test_eps_that_is_written_to_the_op() -> None:
    """A number or None that is written to eps counts from the next call, and stays after ungraft."""
    reference = nn.Sequential(nn.RMSNorm(16))
    model = copy.deepcopy(reference)
    graft(model)
    inputs = torch.randn(4, 16) * 1e-3
    for eps in (1e-2, None, 1e-6, None):
        model[0].eps = reference[0].eps = eps
        torch.testing.assert_close(model(inputs), reference(inputs))
        assert model[0].variance_epsilon == (eps or torch.finfo(torch.float32).eps)
    model[0].variance_epsilon = 0.5
    ungraft(model)
    assert model[0].eps == 0.5


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.RMSNorm((2, 8)), "one dimension"),
        (nn.Conv1d(2, 2, 1), "no adapter recognises it"),
        (nn.LazyLinear(2), "UninitializedParameter"),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2), "no adapter recognises it"),
    ],
    ids=str,
)
def test_torch_modules_that_stay(module: nn.Module, reason: str) -> None:
    """What no op does exactly stays, subclasses of torch's modules included."""
    model = nn.Sequential(module)
    (row,) = graft(model).left_alone
    assert model[0] is module
    assert reason in row.reason


def forward_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *args: None)


def backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda *args: None)


def state_dict_hook(module: nn.Module) -> None:
    module.register_state_dict_post_hook(lambda *args: None)


def instance_forward(module: nn.Module) -> None:
    module.forward = functools.partial(type(module).forward, module)


def weight_norm(module: nn.Module) -> None:
    parametrizations.weight_norm(module)


class Packed(torch.Tensor):
    """A weight in a format of its own."""


def packed_weight(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Packed))


def compiled_in_place(module: nn.Module) -> None:
    module.compile(backend="eager")


# Torch 2.15 hides this warning of its own check, but cannot hide an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (forward_hook, "it has hooks (forward hooks)"),
        (backward_hook, "it has hooks (backward hooks)"),
        (state_dict_hook, "it has hooks (state dict hooks)"),
        (instance_forward, "its forward was set on the instance"),
        (weight_norm, "it has parametrizations"),
        (packed_weight, "its weight is a Packed, which kernels may not take"),
        (compiled_in_place, "it was compiled in place"),
    ],
)
def test_modules_that_other_code_has_taken_hold_of_stay(mlp, x, change, reason: str) -> None:
    """Hooks, parametrizations and instance forwards would be lost, so such a module stays, and the reason is given."""
    model = mlp()
    change(model[1])
    kept, expected = model[1], model(x)
    report = graft(model)
    assert model[1] is kept
    assert reason in [row.reason for row in report.left_alone if row.path == "1"]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # newer torch discourages TorchScript
def test_torchscript_stays() -> None:
    """A TorchScript module is compiled code: nothing in it is replaced."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    (row,) = graft(nn.Sequential(scripted)).left_alone
    assert row.reason == "it is compiled by TorchScript"


def test_the_fused_transformer_layer_keeps_its_modules() -> None:
    """torch's encoder layer reads its children's weights in fused code, so they stay; its decoder layer calls them."""
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            "decoder": nn.TransformerDecoderLayer(16, 2, 32, batch_first=True),
        }
    ).eval()
    x = torch.randn(2, 3, 16)
    expected = [model["encoder"](x), model["decoder"](x, x)]
    report = graft(model)
    assert {row.path for row in report.replaced} == {
        f"decoder.{name}" for name in ("linear1", "linear2", "norm1", "norm2", "norm3")
    }
    reasons = {row.path: row.reason for row in report.left_alone}
    assert reasons["encoder.linear1"] == "TransformerEncoderLayer reads its weights in fused code"
    assert (
        reasons["decoder.self_attn.out_proj"]
        == "MultiheadAttention reads its weights in fused code"
    )
    assert reasons["decoder.self_attn"] == "no adapter recognises it"
    with torch.no_grad():
        for mine, theirs in zip(
            [model["encoder"](x), model["decoder"](x, x)], expected, strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_a_module_in_several_places_becomes_one_op(x) -> None:
    """Sharing survives both ways, and the report has one row for it."""
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.Sequential(shared), None, shared)
    report = graft(model)
    assert [row.path for row in report.replaced] == ["0"]
    assert model[0] is model[1][0] is model[3]
    assert model[0] is not shared
    ungraft(model)
    assert model[0] is model[1][0] is model[3] is shared


def test_tied_weights_stay_tied(x) -> None:
    """Two modules with one weight are two ops with one weight."""
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8, bias=False))
    model[1].weight = model[0].weight
    graft(model)
    assert model[1].weight is model[0].weight
    ungraft(model)
    assert model[1].weight is model[0].weight


def test_training_continues_as_if_nothing_had_happened(mlp, x) -> None:
    """An optimizer made before grafting trains the same parameters, dropout included, to the same values."""
    plain, grafted = mlp().train(), mlp().train()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, grafted)]
    graft(grafted)
    assert grafted[6].training
    for _ in range(3):
        for model, optimizer in zip((plain, grafted), optimizers, strict=True):
            torch.manual_seed(2)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    ungraft(grafted)
    for mine, theirs in zip(grafted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_state_of_the_ops_goes_back_to_the_modules(mlp, x) -> None:
    """What was loaded by assignment, cast or switched to training while grafted is what the modules have afterwards."""
    model, other = mlp(), mlp().double()
    nn.init.ones_(other[1].weight)
    graft(model)
    model.load_state_dict(other.state_dict(), assign=True)
    model.train()
    weight = model[1].weight
    ungraft(model)
    assert model[1].weight is weight
    assert model[1].training
    assert torch.equal(model.eval()(x.double()), other(x.double()))


def duplicate_by_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied = torch.load(buffer, weights_only=False)
    assert isinstance(copied, nn.Module)
    return copied


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), duplicate_by_save],  # noqa: S301
)
def test_copies_of_a_grafted_model(mlp, x, duplicate) -> None:
    """A copy runs, shares nothing with the model, and can be ungrafted on its own."""
    model = mlp()
    expected = model(x)
    graft(model)
    copied = duplicate(model)
    torch.testing.assert_close(copied(x), model(x))
    ungraft(copied)
    assert type(copied[1]) is nn.Linear
    assert torch.equal(copied(x), expected)
    assert copied[1].weight is not model[1].weight
    assert type(model[1]).op_class is Linear


def test_grafting_twice_and_ungrafting_twice(mlp, x) -> None:
    """Ops are left alone, and a model that is not grafted stays as it is."""
    model = mlp()
    modules = list(model)
    graft(model)
    again = graft(model)
    assert again.replaced == ()
    assert {row.reason for row in again.left_alone} == {"already an op", "no adapter recognises it"}
    ungraft(model)
    ungraft(model)
    assert list(model) == modules


def test_an_op_alone_cannot_be_ungrafted(mlp) -> None:
    """Without the model around it an op cannot be exchanged, which is an error rather than nothing."""
    model = mlp()
    graft(model)
    with pytest.raises(GraftError, match="pass the model it is in"):
        ungraft(model[1])


def test_an_op_that_lost_its_parameters_cannot_go_back(mlp) -> None:
    """A parametrization that was put on an op must be taken off first; the error names what is missing."""
    model = mlp()
    graft(model)
    parametrizations.weight_norm(model[1])
    with pytest.raises(GraftError, match="no longer has weight of the Linear"):
        ungraft(model)
    parametrize.remove_parametrizations(model[1], "weight")
    ungraft(model)
    assert type(model[1]) is nn.Linear


def test_models_without_memory(x) -> None:
    """A model on the meta device can be grafted and loaded later."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 4), nn.RMSNorm(4, eps=1e-6, elementwise_affine=False))
    graft(model)
    assert model[0].weight.is_meta
    model.load_state_dict({"0.weight": torch.ones(4, 16), "0.bias": torch.zeros(4)}, assign=True)
    ungraft(model)
    assert model(x).shape == (4, 5, 4)


def test_weightless_norm_is_built_on_the_models_device() -> None:
    """An op with tensors of its own is not left without memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, eps=1e-6, elementwise_affine=False))
    graft(model)
    assert model[1].weight.device == model[0].weight.device
    ungraft(model)
    assert model[1].weight is None


def test_construction_leaves_the_random_generator_alone(mlp) -> None:
    """Grafting draws no random numbers, so that a seeded run stays reproducible."""
    model = mlp()
    state = torch.get_rng_state()
    graft(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_models(mlp, x) -> None:
    """A grafted model compiles as one graph and computes the same."""
    model = mlp()
    graft(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_public_names() -> None:
    """The functions are reached from the package, before and after their module was imported."""
    assert opgraft.graft is graft
    assert callable(opgraft.graft)
    assert opgraft.GraftReport.__module__ == "opgraft.grafting.report"


@pytest.mark.parametrize(
    "function", [opgraft.graft, opgraft.ungraft, opgraft.rebind, opgraft.refresh]
)
def test_what_is_no_module_is_refused(function: Callable[[Any], object]) -> None:
    """The error names the function and what it was given, such as a class in the place of an instance."""
    with pytest.raises(
        TypeError, match=rf"{function.__name__} was given the class .*Linear, expected a torch.nn"
    ):
        function(nn.Linear)
