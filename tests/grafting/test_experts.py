"""Experts of transformers' models: replaced where the maths is that of the op, by whatever class, else left alone."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from opgraft import CustomOp, graft, ops, ungraft
from opgraft.ops import Experts
from torch import Tensor, nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers", minversion="5.0")
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

COMMON = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0,
    "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 8, "head_dim": 16, **FEW},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        **FEW, **LATENT,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2},
}  # fmt: skip
IDS = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))
each_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if name.endswith(".experts")}


@each_family
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_families(family: str, implementation: str) -> None:
    """All experts become ops that run; logits and gradients agree, and ungraft restores modules and every bit."""
    model = build(family, experts_implementation=implementation)
    before, plain, steps = logits(model), experts_of(model), gradients(model)
    parameters, state = (
        dict(model.named_parameters()),
        {k: t.clone() for k, t in model.state_dict().items()},
    )
    report = graft(model)
    rows = [row for row in report.replaced if row.path in plain]
    assert plain
    assert [row.op for row in rows] == ["experts"] * len(plain)
    assert all([part.op for part in row.parts] == ["unquantized_fused_moe"] for row in rows)
    ran: list[Any] = []
    for part in experts_of(model).values():
        assert isinstance(part, Experts)
        part.quant_method.register_forward_hook(lambda *called: ran.append(called))
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    assert len(ran) == len(plain)
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(gradients(model), steps, atol=1e-6, rtol=1e-4)
    ungraft(model)
    assert experts_of(model) == plain
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), before)


def test_another_default_device() -> None:
    """Trials run on the CPU, also while a model is built for another device."""
    model = build("Qwen3Moe")
    with torch.device("meta"):
        graft(model)
    assert all(isinstance(part, Experts) for part in experts_of(model).values())


@each_family
def test_generation(family: str) -> None:
    """A grafted model gives the same tokens, a copy of it too."""
    model = build(family)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(IDS, **options)
    graft(model)
    assert torch.equal(model.generate(IDS, **options), before)
    assert torch.equal(copy.deepcopy(model).generate(IDS, **options), before)


def test_half_of_the_weights_in_training() -> None:
    """Training steps are those of the plain model, and frozen experts stay as they are."""
    models = [build("Mixtral"), build("Mixtral")]
    graft(models[0])
    for model in models:
        model.train()
        model.model.layers[0].mlp.experts.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), atol=1e-6, rtol=1e-4)


def test_autocast() -> None:
    """Under autocast, where norms return float32 and weights are half, the op takes what the module took."""
    model = build("Olmoe").to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model)
        graft(model)
        torch.testing.assert_close(logits(model), before, atol=2e-2, rtol=2e-2)


class Other(nn.Module):
    """Experts of nobody's, in a class that nothing names."""

    def __init__(
        self, experts: int, hidden: int, intermediate: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.count, self.rows, self.activation = experts, 2 * intermediate, activation
        self.gate_up_proj = nn.Parameter(torch.randn(experts, self.rows, hidden) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, intermediate) * 0.2)

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.count):
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(tokens[token], self.gate_up_proj[expert]).split(self.rows // 2, -1)
            made = F.linear(self.activation(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, (made * shares[token, choice, None]).to(out.dtype))
        return out


def inputs(experts: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    shares, ids = torch.rand(5, experts).topk(2)
    return torch.randn(5, hidden), ids, shares


def grafted(module: nn.Module) -> tuple[nn.Module, str]:
    model = nn.ModuleDict({"experts": module})
    report = graft(model)
    reasons = [row.reason for row in report.left_alone if row.path == "experts"]
    return model["experts"], "".join(reasons)


@pytest.mark.parametrize(
    "sizes", [(4, 12, 20), (4, 12, 12), (4, 24, 12), (12, 12, 7), (8, 20, 8), (16, 20, 8)]
)
@pytest.mark.parametrize("activation", [F.silu, F.gelu])
def test_by_what_they_compute(sizes: tuple[int, int, int], activation: Any) -> None:
    """Any class is recognised by its maths, whichever of its sizes are the same."""
    module = Other(*sizes, activation)
    given = inputs(*sizes[:2])
    expected = module(*given)
    op, _ = grafted(module)
    assert isinstance(op, Experts)
    torch.testing.assert_close(op(*given), expected, atol=1e-5, rtol=1e-5)


def clamped(x: Tensor) -> Tensor:
    return F.silu(x.clamp(max=7.0))


def far_clamped(x: Tensor) -> Tensor:
    return F.silu(x.clamp(max=100.0))


class Dropping(Other):
    """Has room for 64 tokens."""

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = super().forward(tokens, chosen, shares)
        out[64:] = 0
        return out


class Counting(Other):
    """Notes how often it was called."""

    calls = 0

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens, chosen, shares)


class InTraining(Other):
    """Drops a half of its output in training."""

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens, chosen, shares), 0.5, self.training)


class Unweighted(Other):
    """Does not weigh what experts say."""

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return super().forward(tokens, chosen, torch.ones_like(shares))


class Serving(Other):
    """Offers a method beside its forward."""

    def load(self) -> Tensor:
        return self.gate_up_proj


ELSEWHERE = "computes something else than fused_experts with silu, gelu, swigluoai"
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another activation": (lambda: Other(4, 12, 20, F.relu), ELSEWHERE),
    "tanh form": (lambda: Other(4, 12, 20, lambda x: F.gelu(x, approximate="tanh")), ELSEWHERE),
    "limits": (lambda: Other(4, 12, 20, clamped), ELSEWHERE),
    "far limits": (lambda: Other(4, 12, 20, far_clamped), ELSEWHERE),
    "room": (lambda: Dropping(4, 12, 20, F.silu), ELSEWHERE),
    "remembers": (lambda: Counting(4, 12, 20, F.silu), ELSEWHERE),
    "training": (lambda: InTraining(4, 12, 20, F.silu), ELSEWHERE),
    "weights": (lambda: Unweighted(4, 12, 20, F.silu), ELSEWHERE),
    "another method": (lambda: Serving(4, 12, 20, F.silu), "defines more than its forward.*: load"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_the_same_stays(what: str) -> None:
    """What computes something else in some case, or offers more, is left alone, with the reason."""
    make, reason = LEFT[what]
    module = make()
    found, said = grafted(module)
    assert found is module
    assert re.search(reason, said)


@use_experts_implementation
class Decorated(MixtralExperts):
    """A subclass that computes what its base does."""


def mixtral(cls: type[nn.Module] = MixtralExperts, implementation: str | None = "eager") -> Any:
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_local_experts": 4}
    module = cls(transformers.MixtralConfig(**sizes, experts_implementation=implementation))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def test_a_subclass() -> None:
    """A subclass with the same maths is replaced and comes back as it was."""
    module = mixtral(Decorated)
    model = nn.ModuleDict({"experts": module})
    graft(model)
    assert isinstance(model["experts"], Experts)
    ungraft(model)
    assert model["experts"] is module


def test_ranks_and_other_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are spread over ranks stay, and those that a function of other code computes."""
    module = mixtral()
    module._is_expert_parallel = True
    assert grafted(module)[1] == "its experts are spread over ranks"
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", lambda self, x, ids, weights: x
    )
    assert (
        "registered its experts implementation 'mine'" in grafted(mixtral(implementation="mine"))[1]
    )


def test_hooks() -> None:
    """Hooks on the module keep it; those on its activation are called, before graft and after it."""
    module = mixtral()
    handle = module.register_forward_hook(lambda *called: None)
    assert "it has hooks" in grafted(module)[1]
    handle.remove()
    given, seen = inputs(4, 12), []
    expected = module(*given)
    op: Any = grafted(module)[0]
    handle = op.act_fn.register_forward_hook(lambda *called: seen.append(called))
    torch.testing.assert_close(op(*given), expected, atol=1e-6, rtol=1e-5)
    assert len(seen) == len(given[1].unique())
    assert op.idle() == {"quant_method"}
    handle.remove()
    op(*given)
    assert len(seen) == len(given[1].unique())
    assert op.idle() == {"act_fn"}


class Fast(ops.UnquantizedFusedMoEMethod):
    """A kernel for experts that notes its calls."""

    calls: ClassVar[list[Any]] = []

    def forward_oot(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(tuple(layer.w13_weight.shape))
        return self.forward_native(layer, *args, **kwargs)


class Packing(ops.UnquantizedFusedMoEMethod):
    """A method with weights of its own."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_a_replaced_method(family: str) -> None:
    """Grafted experts run the kernel that a plugin provides, on weights as the form has them; the report says so."""
    CustomOp.register_oot(Fast, name="UnquantizedFusedMoEMethod")
    Fast.calls.clear()
    model = build(family)
    before = logits(model)
    report = graft(model)
    parts = [part for row in report.replaced if row.op == "experts" for part in row.parts]
    assert [part.implementation.rpartition(".")[2] for part in parts] == ["forward_oot"] * 2
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    assert Fast.calls == [(4, 192, 64)] * 2


def test_a_method_with_weights_of_its_own() -> None:
    """It would not find its weights in a grafted module, which stays, with the reason."""
    CustomOp.register_oot(Packing, name="UnquantizedFusedMoEMethod")
    module = mixtral()
    found, said = grafted(module)
    assert found is module
    assert "Packing defines process_weights_after_loading" in said
