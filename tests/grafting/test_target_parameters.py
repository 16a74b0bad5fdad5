"""LoRA on parameters, as PEFT's ``target_parameters`` has it for experts, before and after ``graft``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from opgraft import graft, ungraft
from opgraft.ops import Experts
from torch import Tensor, nn
from torch.nn.utils import parametrize

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(10)[None]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: Mapping[str, list[str]] = {
    "Mixtral": EXPERTS,
    "GptOss": EXPERTS,
    "Qwen3Moe": EXPERTS[1:],
    "Llama": ["gate_proj.weight", "q_proj.weight"],
}
ORDERS = ("graft, then peft", "peft, then graft")


def made(family: str) -> Any:
    """Make a decoder of random weights, with experts if the family has any."""
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2}
    more = {
        "Mixtral": routed,
        "GptOss": {**routed, "head_dim": 16},
        "Qwen3Moe": {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    }
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more.get(family, {})})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def adapted(model: nn.Module, targets: list[str]) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["v_proj"], target_parameters=targets, init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()


def answers(model: Any) -> list[Tensor]:
    """Return logits with an adapter, with another one, without, and with the merged one."""
    with torch.no_grad():
        found = [model(input_ids=IDS).logits]
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
        found.append(model(input_ids=IDS).logits)
        with model.disable_adapter():
            found.append(model(input_ids=IDS).logits)
        found.append(model.merge_and_unload()(input_ids=IDS).logits)
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    model(input_ids=IDS).logits.square().sum().backward()
    named = model.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", TARGETS)
def test_adapters_of_parameters(family: str, order: str) -> None:
    """Logits and gradients are those of the model without graft, in either order."""
    base, targets = made(family), TARGETS[family]
    plain, model = adapted(copy.deepcopy(base), targets), copy.deepcopy(base)
    if order == ORDERS[0]:
        graft(model)
    model = adapted(model, targets)
    if order == ORDERS[1]:
        graft(model)
    assert any(isinstance(each, Experts) for each in model.modules()) == (family != "Llama")
    model.load_state_dict(plain.state_dict())
    wanted, got = gradients(plain), gradients(model)
    assert wanted.keys() == got.keys()
    assert any("lora_" in name for name in got)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5)
    for mine, expected in zip(answers(model), answers(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


class Doubled(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * 2


def test_parametrized_weights_and_biases_of_experts() -> None:
    """Every weight and bias of experts may be computed by a parametrization."""
    model = made("GptOss").model.layers[0].mlp
    reference = copy.deepcopy(model)
    graft(model)
    assert isinstance(model.experts, Experts)
    names = [name for name, _ in reference.experts.named_parameters()]
    assert len(names) == 4
    x = torch.randn(1, 5, 32)
    for name in names:
        parametrize.register_parametrization(model.experts, name, Doubled())
        getattr(reference.experts, name).data.mul_(2)
        with torch.no_grad():
            torch.testing.assert_close(model(x)[0], reference(x)[0], rtol=1e-4, atol=1e-5)
    for name in names:
        parametrize.remove_parametrizations(model.experts, name)
    ungraft(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], reference(x)[0], rtol=1e-4, atol=1e-5)
