"""Models that are grafted and then packed: what they compute, what stays, and that they come back whole."""

from __future__ import annotations

import copy
import os
import pickle
import weakref
from typing import Any

import opgraft
import pytest
import torch
from opgraft.errors import GraftError
from opgraft.ops import Linear
from opgraft.ops.composites.encoder import LinearAct
from opgraft.ops.freezing import PackedLinear
from support.packing import needs_onednn, record_calls
from torch import Tensor, nn
from torch.nn.utils import parametrize

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers")

pytestmark = needs_onednn

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IDS = torch.tensor([[5, 9, 3, 12, 77], [4, 8, 15, 16, 23]])


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    record_calls(monkeypatch)


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    arguments = {**SMALL, **changes}
    if family == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**arguments, num_key_value_heads=2)
        ).eval()
    return transformers.BertForMaskedLM(transformers.BertConfig(**arguments)).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(input_ids=IDS).logits
    return result


def weights(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Linear)}


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_model_is_packed_and_comes_back(family: str) -> None:
    """Logits agree, plain weights are gone, files are alike; ungraft gives the same modules, keys and bits."""
    model = build(family, tie_word_embeddings=False)
    before, keys = logits(model), list(model.state_dict())
    structure = list(model.named_modules(remove_duplicate=False))
    originals = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    opgraft.graft(model)
    memory = {path: weakref.ref(op.weight.untyped_storage()) for path, op in weights(model).items()}
    report = opgraft.freeze(model, keep_plain=False)
    packed = [row.path for row in report.packed]
    assert sorted(packed) == sorted(memory)
    assert len(packed) > 8
    assert report.kept == ()
    assert [path for path in packed if memory[path]() is not None] == []
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    state = model.state_dict()
    assert list(state) == keys
    assert all(torch.equal(state[name], original) for name, original in originals.items())
    opgraft.ungraft(model)
    assert list(model.named_modules(remove_duplicate=False)) == structure
    assert [name for name, _ in model.named_parameters()] == list(originals)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, originals[name])
        assert parameter.requires_grad
    assert torch.equal(logits(model), before)


def test_what_follows_is_computed_with_packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations and residuals that composites hand to a linear layer are part of its call when packed, too."""
    model = build("bert", tie_word_embeddings=False)
    before = logits(model)
    opgraft.graft(model)
    made = record_calls(monkeypatch)
    logits(model)
    plain = [call for call in made if call != "pack"]
    opgraft.freeze(model, keep_plain=False)
    made.clear()
    after = logits(model)
    assert made == plain
    assert made.count("linear_add") == 2 * SMALL["num_hidden_layers"]
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    layers = [layer for layer in model.modules() if isinstance(layer, LinearAct)]
    assert [layer.idle() for layer in layers] == [{layer.names[1]} for layer in layers]
    assert layers


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_ties_stay(family: str) -> None:
    """An output layer that shares its weight with the embedding keeps it, and they stay tied."""
    model = build(family, tie_word_embeddings=True)
    opgraft.graft(model)
    report = opgraft.freeze(model, keep_plain=False)
    (row,) = [row for row in report.kept if "embed" in row.reason]
    assert isinstance(model.get_submodule(row.path), Linear)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    copied = copy.deepcopy(model)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def test_copies_of_a_packed_model() -> None:
    """Copies and files are packed, compute the same, and are ungrafted without the first one noticing."""
    model = build("bert", tie_word_embeddings=False)
    plain = logits(model)
    opgraft.graft(model)
    opgraft.freeze(model, keep_plain=False)
    before = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # our own bytes
        assert torch.equal(logits(copied), before)
        assert all(
            isinstance(op, PackedLinear) and op._packed is not None
            for op in weights(copied).values()
        )
        opgraft.ungraft(copied)
        assert weights(copied) == {}
        assert torch.equal(logits(copied), plain)
    assert torch.equal(logits(model), before)


def test_a_packed_model_is_moved_loaded_and_compiled() -> None:
    """What is done with models goes on: other dtypes, weights of another model, compilation as one graph."""
    model, other = (
        build("llama", tie_word_embeddings=False),
        build("llama", tie_word_embeddings=False),
    )
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    opgraft.graft(model)
    opgraft.freeze(model, keep_plain=False)
    model.double().float()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), logits(other), atol=1e-5, rtol=1e-5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(other), atol=1e-5, rtol=1e-5)
    opgraft.ungraft(model)
    assert torch.equal(logits(model), logits(other))


def test_ungraft_leaves_what_graft_did_not_make() -> None:
    """An op that the model's author wrote stays packed when the rest is ungrafted."""
    model = nn.Sequential(Linear(16, 16), nn.Linear(16, 16)).eval()
    opgraft.graft(model)
    assert len(opgraft.freeze(model, keep_plain=False).packed) == 2
    opgraft.ungraft(model)
    assert isinstance(model[0], PackedLinear)
    assert type(model[1]) is nn.Linear
    assert model[1]._parameters.keys() == {"weight", "bias"}


def test_what_cannot_be_ungrafted() -> None:
    """A packed layer whose class other code changed is named, and ungrafting goes on when that was taken back."""
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    opgraft.graft(model)
    opgraft.freeze(model, keep_plain=False)
    parametrize.register_parametrization(model[0], "bias", nn.Identity())
    with pytest.raises(
        GraftError, match="derived from a packed layer by other code, such as a parametrization"
    ):
        opgraft.ungraft(model)
    parametrize.remove_parametrizations(model[0], "bias")
    opgraft.ungraft(model)
    assert type(model[0]) is nn.Linear
