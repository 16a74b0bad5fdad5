"""PEFT finds the linear layers of a grafted model by class, as in the plain model."""

from __future__ import annotations

import copy
import io
import logging
import re
import threading
import time
from typing import Any

import pytest
import torch
from opgraft import OpgraftConfig, graft, rebind, set_config, ungraft
from opgraft.binding.standing import standing_for
from opgraft.ops import TransposedLinear
from torch import Tensor, nn
from torch.nn.utils import parametrize

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

IDS = torch.arange(10)[None]
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
USUAL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2LMHeadModel", {**GPT, **TOKENS}),
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", GPT),
    "Llama": ("LlamaForCausalLM", {**USUAL, "num_key_value_heads": 2}),
    "Bert": ("BertForMaskedLM", USUAL),
}


def made(family: str) -> Any:
    name, sizes = MODELS[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


def adapted(model: nn.Module, config: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, copy.deepcopy(config)).eval()


def answers(model: Any) -> list[Tensor]:
    """Return logits with the adapter, without it, and with the merged one."""
    with torch.no_grad():
        found = [model(input_ids=IDS).logits]
        with model.disable_adapter():
            found.append(model(input_ids=IDS).logits)
        found.append(model.merge_and_unload()(input_ids=IDS).logits)
    return found


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("family", MODELS)
def test_all_linear_layers_after_graft(family: str) -> None:
    """``target_modules="all-linear"`` adapts the same layers before and after ``graft``."""
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    plain = adapted(made(family), config)
    names = set(plain.state_dict())
    grafted = made(family)
    graft(grafted)
    grafted = adapted(grafted, config)
    assert set(grafted.state_dict()) == names
    grafted.load_state_dict(plain.state_dict())
    for got, expected in zip(answers(grafted), answers(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_class_of_the_module_stays_findable() -> None:
    """An op in the place of a Conv1D is one for isinstance, also after copies and other choices."""
    model = made("GPT2")
    graft(model)
    layer = model.transformer.h[0].attn.c_attn
    assert isinstance(layer, Conv1D)
    assert layer.op_class is TransposedLinear
    assert repr(layer).startswith("TransposedLinear(in_features=32, out_features=96")
    x = torch.randn(3, 32)
    expected = layer(x)

    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(layer), saved):
        assert isinstance(other, Conv1D)
        assert type(other) is type(layer)
        torch.testing.assert_close(other(x), expected)

    with set_config(OpgraftConfig(providers={"linear": "native"})):
        rebind(model)
        assert isinstance(layer, Conv1D)
        torch.testing.assert_close(layer(x), expected)
    rebind(model)
    assert isinstance(layer, Conv1D)

    parametrize.register_parametrization(layer, "weight", nn.Identity())
    parametrize.remove_parametrizations(layer, "weight")
    assert layer.op_class is TransposedLinear
    ungraft(model)
    assert type(model.transformer.h[0].attn.c_attn) is Conv1D


class Picky(type):
    """A metaclass that no other class has."""


class Odd(nn.Module, metaclass=Picky):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 4), self.weight).view(*x.shape[:-1], 6)


class Final(Odd):
    def __init_subclass__(cls) -> None:
        raise TypeError("no class is derived from Final")


@pytest.mark.parametrize("cls", [Odd, Final])
def test_a_class_that_cannot_be_a_base(
    cls: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """A module is replaced and computes as before, whether its class can be a base or not. The log says why not."""
    model = nn.Sequential(cls())
    x = torch.randn(3, 4)
    expected = model(x)
    with caplog.at_level(logging.DEBUG, "opgraft"):
        graft(model)
    assert isinstance(model[0], TransposedLinear)
    assert isinstance(model[0], cls) == (cls is Odd)
    torch.testing.assert_close(model(x), expected)
    told = [text for text in caplog.messages if text.startswith("isinstance does not find")]
    assert len(told) == (cls is Final)
    for each in told:
        assert re.search(r"TransposedLinear by the class \S+\.Final: TypeError: no class", each)


class Slow(nn.Module):
    """A class whose subclasses take a while to make."""

    def __init_subclass__(cls) -> None:
        time.sleep(0.05)


def test_threads_share_the_class_of_an_op() -> None:
    """Threads that ask at once for the class of an op get the same one."""
    found, barrier = [], threading.Barrier(4)
    specialisation = TransposedLinear(4, 6).binding.specialisation

    def ask() -> None:
        barrier.wait()
        found.append(standing_for(specialisation, Slow))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert issubclass(found[0], Slow)
    assert len(found) == 4
    assert len(set(found)) == 1
