"""Norms of models, recognised by their formula: those of transformers, and classes of the shape that other code has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opgraft import graft, ungraft
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSFlowLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.videoprism.modeling_videoprism import VideoPrismLayerNorm

WIDTH = 18


class LayerNormBackInItsDtype(nn.LayerNorm):
    """A subclass that computes as its base does and casts, as vision towers trained in half types have it."""

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.to(given)


class LayerNormInFloat32(nn.LayerNorm):
    """The same, which casts its input and its parameters first."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class LayerNormByVariance(nn.Module):
    """A layer norm by hand, over the last dimension."""

    def __init__(self, unbiased: bool = False, dim: int = -1) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.unbiased, self.dim = unbiased, dim

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(self.dim, keepdim=True)
        variance = x.var(self.dim, unbiased=self.unbiased, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Computed(nn.Module):
    """A norm with a weight and a bias whose formula is given."""

    def __init__(self, formula: Callable[..., Tensor]) -> None:
        super().__init__()
        self.formula = formula
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight, self.bias)


NORMS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "T5": ("rms_norm", lambda: T5LayerNorm(WIDTH)),
    "Cohere": ("layer_norm", lambda: CohereLayerNorm(WIDTH)),
    "DeBERTa": ("layer_norm", lambda: DebertaLayerNorm(WIDTH, 1e-7)),
    "ConvNeXt, channels last": ("layer_norm", lambda: ConvNextLayerNorm(WIDTH)),
    "OLMo, without parameters": ("layer_norm", lambda: OlmoLayerNorm(WIDTH)),
    "PocketTTS": ("layer_norm", lambda: PocketTTSFlowLayerNorm(WIDTH)),
    "PocketTTS, without parameters": (
        "layer_norm",
        lambda: PocketTTSFlowLayerNorm(WIDTH, elementwise_affine=False),
    ),
    "Llama 4, without weight": ("unscaled_rms_norm", Llama4TextL2Norm),
    "Gemma 3n, without weight": (
        "unscaled_rms_norm",
        lambda: Gemma3nRMSNorm(WIDTH, with_scale=False),
    ),
    "back in its dtype": ("layer_norm", lambda: LayerNormBackInItsDtype(WIDTH)),
    "in float32": ("layer_norm", lambda: LayerNormInFloat32(WIDTH)),
    "in float32, without bias": ("layer_norm", lambda: LayerNormInFloat32(WIDTH, bias=False)),
    "by variance": ("layer_norm", LayerNormByVariance),
}
UNSIZED = {"PocketTTS, without parameters"}  # nothing says for which size of rows it was made

GATED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Mamba 2": (lambda: MambaRMSNormGated(WIDTH, 6), {"group_size": 6, "norm_before_gate": False}),
    "Mamba 2, one group": (
        lambda: MambaRMSNormGated(WIDTH, WIDTH),
        {"group_size": WIDTH, "norm_before_gate": False},
    ),
    "Qwen3-Next": (
        lambda: Qwen3NextRMSNormGated(WIDTH),
        {"group_size": None, "norm_before_gate": True},
    ),
    "Kimi": (
        lambda: KimiLinearRMSNormGated(WIDTH),
        {"activation": "sigmoid", "norm_before_gate": True},
    ),
    "Falcon-H1": (
        lambda: FalconH1RMSNormGated(WIDTH, n_groups=3),
        {"group_size": 6, "norm_before_gate": True},
    ),
    "Falcon-H1, gate first": (
        lambda: FalconH1RMSNormGated(WIDTH, n_groups=3, norm_before_gate=False),
        {"group_size": 6, "norm_before_gate": False},
    ),
}
UNGATED = {"Mamba 2", "Mamba 2, one group"}  # which compute without a gate too
SHORT = {("Mamba 2", torch.bfloat16), ("Kimi", torch.float32)}
"""Cases with both orders and activations, rows whole and in groups, a half type; each takes seconds."""


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.5, generator=generator)
    return module.to(dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Rows of very different size, as the smallest show eps."""
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-3, 2, shape[-1]).unsqueeze(-1)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    half = wanted.dtype in (torch.float16, torch.bfloat16)
    assert found.dtype == wanted.dtype
    tolerance = 2e-2 if half else 1e-5
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_agree(name: str, dtype: torch.dtype) -> None:
    """Each is replaced by its op, which computes the same, with gradients, for any rows, and gives everything back."""
    op, make = NORMS[name]
    model = nn.Sequential(filled(make(), dtype))
    module, state = model[0], dict(model.state_dict())
    inputs = [rows(*shape, dtype=dtype) for shape in ((1,), (7,), (2, 3), (2, 1, 5))]
    expected = [model(x) for x in inputs]
    report = graft(model)
    if name in UNSIZED:
        assert report.replaced == ()
        return
    assert [row.op for row in report.replaced] == [op]
    for x, wanted in zip(inputs, expected, strict=True):
        close(model(x), wanted)
    assert list(model.state_dict()) == list(state)
    assert all(
        value.data_ptr() == state[key].data_ptr() for key, value in model.state_dict().items()
    )
    ungraft(model)
    assert model[0] is module
    assert all(torch.equal(model(x), wanted) for x, wanted in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("name", sorted(NORMS.keys() - UNSIZED))
def test_gradients_of_norms_agree(name: str) -> None:
    """Input and parameters get the gradients that they get without grafting."""
    model, x = nn.Sequential(filled(NORMS[name][1]())), rows(4, 5).requires_grad_()
    wanted = torch.autograd.grad(model(x).sin().sum(), (x, *model.parameters()))
    graft(model)
    found = torch.autograd.grad(model(x).sin().sum(), (x, *model.parameters()))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


class Gate(nn.Module):
    """A module that calls its norm with a gate."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = self.norm(x, gate)
        return out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * ((name, dtype) not in SHORT))
        for name in GATED
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_gated_norms_agree(name: str, dtype: torch.dtype) -> None:
    """A norm with a gate becomes the gated op with its own groups, order and activation, at any shape.

    Where the module lets the gate be missing it may be.
    """
    make, settings = GATED[name]
    model = Gate(filled(make(), dtype))
    inputs = [
        (rows(*s, dtype=dtype), rows(*s, dtype=dtype, seed=2)) for s in ((2, 3), (1, 7), (3, 1))
    ]
    inputs = [(x.requires_grad_(), gate.requires_grad_()) for x, gate in inputs]
    expected = [model(x, gate) for x, gate in inputs]
    gradients = [
        torch.autograd.grad(model(*pair).sum(), (*pair, model.norm.weight)) for pair in inputs
    ]
    module = model.norm
    alone = [module(x) for x, _ in inputs] if name in UNGATED else []
    assert [row.op for row in graft(model).replaced] == ["rms_norm_gated"]
    assert {key: getattr(model.norm, key) for key in settings} == settings
    for pair, wanted, gradient in zip(inputs, expected, gradients, strict=True):
        close(model(*pair), wanted)
        if dtype is torch.float32:
            found = torch.autograd.grad(model(*pair).sum(), (*pair, model.norm.weight))
            torch.testing.assert_close(found, gradient, atol=1e-3, rtol=1e-4)
    for (x, _), wanted in zip(inputs[: len(alone)], alone, strict=True):
        close(model.norm(x), wanted)
    ungraft(model)
    assert model.norm is module


class OtherGate(MambaRMSNormGated):
    """The gated norm with one operation exchanged."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states, None if gate is None else gate * 2)


class GateAfterTheWeight(nn.Module):
    """A norm that centres too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x * F.silu(gate)


class InTrainingOnly(MambaRMSNormGated):
    """A gated norm that ignores the gate in training."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states, None if self.training else gate)


class OtherwiseForOneToken(MambaRMSNormGated):
    """A gated norm with one operation more where it is given a single token."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        out: Tensor = super().forward(hidden_states, gate)
        return out.clamp(-0.1, 0.1) if hidden_states.shape[-2:-1] == (1,) else out


class OtherwiseForManyTokens(MambaRMSNormGated):
    """A gated norm with one operation more where it is given long sequences."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        out: Tensor = super().forward(hidden_states, gate)
        return out.clamp(-0.1, 0.1) if hidden_states.shape[-2] > 2048 else out


class OtherwiseForFourDimensions(MambaRMSNormGated):
    """A gated norm with one operation more where it is given four dimensions."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        out: Tensor = super().forward(hidden_states, gate)
        return out.clamp(-0.1, 0.1) if hidden_states.dim() == 4 else out


class Remembers(MambaRMSNormGated):
    """A gated norm that keeps its gate for somebody to look at."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        self.last = gate
        return super().forward(hidden_states, gate)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OtherGate(WIDTH, 6),
        GateAfterTheWeight,
        lambda: InTrainingOnly(WIDTH, 6),
        lambda: OtherwiseForOneToken(WIDTH, 6),
        lambda: OtherwiseForManyTokens(WIDTH, 6),
        lambda: OtherwiseForFourDimensions(WIDTH, 6),
        lambda: Remembers(WIDTH, 6),
    ],
)
def test_what_is_nearly_a_gated_norm_stays(make: Callable[[], nn.Module]) -> None:
    """One other operation, and the module is left alone."""
    model = Gate(make())
    assert graft(model).replaced == ()


@pytest.mark.parametrize(
    "module",
    [
        ConvNextLayerNorm(WIDTH, data_format="channels_first"),
        VideoPrismLayerNorm(WIDTH),
        LayerNormByVariance(unbiased=True),
        LayerNormByVariance(dim=1),
        LayerNormBackInItsDtype((3, WIDTH)),
        Computed(lambda x, w, b: (F.layer_norm(x, (WIDTH,)) + b) * w),
        Computed(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b) + x),
        Computed(lambda x, w, b: F.layer_norm(x, (WIDTH,), b, w)),
        Computed(lambda x, w, b: w * x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6) + b),
        Computed(lambda x, w, b: F.group_norm(x, 1, None, None) * w + b),
    ],
)
def test_what_is_nearly_a_layer_norm_stays(module: nn.Module) -> None:
    """Another dimension, variance, order or operation, and the module is left alone, with a reason."""
    model = nn.Sequential(module)
    report = graft(model)
    assert model[0] is module
    assert report.replaced == ()
    assert report.left_alone[0].reason.startswith("no adapter recognises it")


def test_a_question_about_another_dtype_is_none_that_tracing_answers() -> None:
    """A forward that asks for the dtype of its input depends on the call, and is left alone."""

    class AsksItsInput(T5LayerNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            if hidden_states.dtype == torch.float16:
                return hidden_states
            return super().forward(hidden_states)

    (row,) = graft(nn.Sequential(AsksItsInput(WIDTH))).left_alone
    assert "TraceError" in row.reason


@pytest.mark.parametrize("make", [T5LayerNorm, CohereLayerNorm])
def test_a_half_norm_in_a_model_with_wider_parameters_stays(
    make: Callable[[int], nn.Module],
) -> None:
    """Where float32 may reach a norm in half precision, which T5's rounds and ``layer_norm`` refuses, it stays."""
    norm = filled(make(WIDTH), torch.float16)
    wide = nn.Sequential(norm, nn.Linear(2, 2))
    expected = wide[0](rows(3))
    assert not [row for row in graft(wide).replaced if row.path == "0"]
    assert torch.equal(wide[0](rows(3)), expected)
    ungraft(wide)
    assert len(graft(nn.Sequential(norm)).replaced) == 1
