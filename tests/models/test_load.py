"""Tensors reach the parameters that take them, by tables of names, and one error tells all that does not fit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from opgraft import OpgraftConfig, ops, set_config
from opgraft.errors import CheckpointError, WeightError
from opgraft.models import WeightsMapper, load, load_weights, open_weights
from torch import nn

from .conftest import llama_config, transformers, write_gguf


class Packed(nn.Linear):
    """A linear made of several, each of which keeps its rows by its ``shard_id``."""

    def __init__(self, width: int, sizes: dict[str | int, int]) -> None:
        super().__init__(width, sum(sizes.values()), bias=False)
        self.weight.weight_loader = partial(self.load, sizes=sizes)  # type: ignore[attr-defined]
        self.processed: list[bool] = []

    def load(self, parameter, loaded, shard_id=None, *, sizes) -> None:
        names = list(sizes) if shard_id is None else [shard_id]
        start = sum(size for name, size in list(sizes.items())[: list(sizes).index(names[0])])
        part = parameter.data.narrow(0, start, sum(sizes[name] for name in names))
        if part.shape != loaded.shape:
            raise ValueError(f"expected {tuple(part.shape)}")
        part.copy_(loaded)

    def process_weights_after_loading(self) -> None:
        self.processed.append(bool((self.weight != 0).all()))


class Block(nn.Module):
    """One block with packed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = Packed(8, {"q": 8, "k": 4, "v": 4})
        self.gate_up_proj = Packed(8, {0: 6, 1: 6})
        self.norm = nn.LayerNorm(8, bias=False)


class Model(nn.Module):
    """Two blocks, an embedding and a head that is tied to it."""

    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("own", torch.zeros(3), persistent=False)


def checkpoint() -> dict[str, torch.Tensor]:
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "gate_proj": 6, "up_proj": 6}
    names = {
        f"blocks.{i}.{name}.weight": (size, 8) for i in range(2) for name, size in rows.items()
    }
    names |= {f"blocks.{i}.norm.weight": (8,) for i in range(2)} | {
        "embed.weight": (10, 8),
        "steps": (3,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) + 1 for name, shape in names.items()}


def test_stacked_layers_tied_weights_and_hooks() -> None:
    """Packed layers are filled in parts, a tied head by its other name; hooks run once, after all rows are filled."""
    weights, model = checkpoint(), Model()
    left = {
        f"blocks.0.{name}": torch.ones(2)
        for name in ("rotary_emb.inv_freq", "attn.k_scale", "attn.v_scale")
    }
    loaded = load_weights(model, {**weights, **left, "head.weight": weights["embed.weight"]})
    assert loaded.tensors == len(weights)
    assert loaded.ignored == (*left, "head.weight")
    block = model.blocks[1]
    parts = [weights[f"blocks.1.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(block.qkv_proj.weight, torch.cat(parts))
    assert torch.equal(model.head.weight, weights["embed.weight"])
    assert torch.equal(model.steps, weights["steps"])
    assert [block.qkv_proj.processed, block.gate_up_proj.processed] == [[True], [True]]


def test_a_packed_tensor_is_taken_whole() -> None:
    """A checkpoint may have the packed layer itself."""
    weights, model = checkpoint(), Model()
    parts = [weights.pop(f"blocks.0.{name}_proj.weight") for name in "qkv"]
    load_weights(model, {**weights, "blocks.0.qkv_proj.weight": torch.cat(parts)})
    assert torch.equal(model.blocks[0].qkv_proj.weight, torch.cat(parts))


def test_names_are_mapped() -> None:
    """Prefixes, parts and endings are changed by data, and a part that maps to None drops the tensor."""
    weights, model = checkpoint(), Model()
    theirs = {
        f"model.{name.replace('norm', 'ln').replace('weight', 'w')}": t
        for name, t in weights.items()
    }
    theirs["vision.x"] = torch.ones(1)
    mapper = WeightsMapper({"model.": "", "vision.": None}, {".ln.": ".norm."}, {".w": ".weight"})
    assert load_weights(model, theirs, mapper=mapper).ignored == ("vision.x",)
    assert torch.equal(model.blocks[0].norm.weight, weights["blocks.0.norm.weight"])


def test_one_error_lists_all_that_does_not_fit() -> None:
    """Missing, unexpected and mis-shaped tensors are counted and named together, near names with them."""
    weights, model = checkpoint(), Model()
    weights["blocks.0.k_projj.weight"] = weights.pop("blocks.0.k_proj.weight")
    weights["blocks.1.norm.weight"] = torch.ones(9)
    weights["other"] = torch.ones(1)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, weights)
    message = str(caught.value)
    assert "the Model that the configuration describes: 4 problems: " in message
    assert (
        "'blocks.0.k_proj.weight (a part)' is missing (near: 'blocks.0.k_projj.weight')" in message
    )
    assert "'blocks.0.k_projj.weight' has no place (near: 'blocks.0.k_proj.weight')" in message
    assert "'other' has no place" in message
    assert "'blocks.1.norm.weight' has shape [9], the model has [8]" in message
    assert model.blocks[0].qkv_proj.processed == []
    with pytest.raises(CheckpointError, match=r"embed.weight' is missing"):
        load_weights(
            Model(), {name: t for name, t in checkpoint().items() if name != "embed.weight"}
        )


def test_loaders_that_refuse_are_listed_together() -> None:
    """A part that its loader refuses is a problem like any other, with the loader's words."""
    weights = checkpoint()
    weights["blocks.0.q_proj.weight"] = weights["blocks.1.up_proj.weight"] = torch.ones(3, 8)
    with pytest.raises(
        CheckpointError,
        match=r"2 problems: .*q_proj.*expected \(8, 8\).*up_proj.*expected \(6, 8\)",
    ):
        load_weights(Model(), weights)


class Untied(nn.Module):
    """An embedding and a head of its own, though the config ties them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = llama_config(tie_word_embeddings=True)
        self.model = nn.ModuleDict({"embed_tokens": ops.VocabParallelEmbedding(96, 8)})
        self.lm_head = ops.ParallelLMHead(96, 8)
        self.norm = ops.RMSNorm(8)


def test_a_head_that_the_config_ties() -> None:
    """The error about its weight tells how to tie it; where more is wrong, or it is not tied, as for any other."""
    model, weights = (
        Untied(),
        {"model.embed_tokens.weight": torch.ones(96, 8), "norm.weight": torch.ones(8)},
    )
    way = r"self\.lm_head = self\.lm_head\.tie_weights\(self\.model\.embed_tokens\)"
    with pytest.raises(
        CheckpointError, match=rf"'lm_head.weight' is missing: .*tie_word_embeddings.* {way}"
    ) as caught:
        load_weights(model, weights)
    assert str(caught.value).endswith("Next: tie the head where the model is constructed.")
    with pytest.raises(
        CheckpointError, match=rf"2 problems: .*{way}.* Next: give the configuration"
    ):
        load_weights(model, {"model.embed_tokens.weight": torch.ones(96, 8)})
    model.config.tie_word_embeddings = False
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' is missing\. Next: give the configuration"
    ):
        load_weights(model, weights)
    model.config.tie_word_embeddings = True
    model.lm_head = model.lm_head.tie_weights(model.model["embed_tokens"])  # type: ignore[assignment]
    load_weights(model, weights)


def test_the_reason_of_many_shapes_is_given_once() -> None:
    """Weights of other shapes are told by their sizes, and why that may be stands before the list."""
    layers = nn.ModuleDict(
        {f"a{i}": ops.ColumnParallelLinear(4, 8, bias=False, prefix=f"a{i}") for i in range(3)}
    )
    with pytest.raises(
        CheckpointError, match=r"'a0': the weight .* \(9, 4\), expected 8 in dimension 0.*'a2': "
    ) as caught:
        load_weights(layers, {f"a{i}.weight": torch.ones(9, 4) for i in range(3)})
    assert "belong together" not in str(caught.value)
    assert "WeightError" not in str(caught.value)
    with pytest.raises(WeightError, match="do not belong together"):
        layers["a0"].weight.weight_loader(layers["a0"].weight, torch.ones(9, 4))


def test_many_problems_are_limited() -> None:
    """A checkpoint of another model gives twenty lines and a count."""
    with pytest.raises(CheckpointError, match=r"; and 9[0-9] more"):
        load_weights(Model(), {f"x{i}": torch.ones(1) for i in range(100)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_models_are_filled(llama, sharded, tmp_path, dtype) -> None:
    """A Llama of transformers gets its weights from shards and from GGUF, converted to its dtype."""
    empty = transformers.LlamaForCausalLM(llama_config()).to(dtype)
    load_weights(empty, open_weights(sharded).tensors)
    assert all(
        torch.equal(tensor, llama.state_dict()[name].to(dtype))
        for name, tensor in empty.state_dict().items()
    )
    expected = write_gguf(tmp_path / "model.gguf", llama, "Q8_0")
    load_weights(empty, open_weights(tmp_path).tensors)
    assert all(
        torch.equal(tensor, expected[name].to(dtype)) for name, tensor in empty.state_dict().items()
    )


def test_a_config_that_contradicts_the_weights(sharded) -> None:
    """A configuration of another size is one error, which says so."""
    model = transformers.LlamaForCausalLM(llama_config(hidden_size=128, intermediate_size=512))
    with pytest.raises(
        CheckpointError, match="not those of the LlamaForCausalLM that the configuration describes"
    ):
        load_weights(model, open_weights(sharded).tensors)


def test_the_bar_is_for_terminals(capsys) -> None:
    """Nothing is drawn where stderr is no terminal, asked for or not."""
    load_weights(Model(), checkpoint(), progress=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kept", [False, True])
def test_free_memory_is_given_back_on_the_way(kept: bool, monkeypatch) -> None:
    """A bounded number of times, however large the weights, and never where the setting has it kept."""
    released = []
    monkeypatch.setattr(load, "release_free_memory", lambda: released.append(True))
    weights = {f"{i}.weight": torch.ones(1 << 11, 1 << 10) for i in range(6)}
    model = nn.Sequential(*(nn.Linear(1 << 10, 1 << 11, bias=False) for _ in weights))
    with set_config(OpgraftConfig(cpu_keep_memory=kept)):
        load_weights(model, weights)
        large = len(released)
        monkeypatch.setattr(load, "_RELEASES", 2)
        load_weights(model, weights)
    assert [large, len(released) - large] == ([0, 0] if kept else [7, 3])
