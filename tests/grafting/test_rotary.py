"""Rotary application in attention modules: through an op of the instance, without a change to its file."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft import graft, ungraft
from opgraft.grafting.rotary import ADAPTER
from opgraft.ops import ApplyRotaryEmb, CustomOp
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama  # noqa: E402  # after the variable is set

FAMILIES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "mixtral": "MixtralConfig",
}
Shapes = list[tuple[int, ...]]


SHAPES: Shapes = []


class FastRotary(ApplyRotaryEmb):
    """A kernel of the op that notes the shapes it is called with."""

    def forward_oot(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            SHAPES.append(tuple(x.shape))
        return self.forward_native(x, cos, sin)


@pytest.fixture
def rotated() -> Shapes:
    """What the kernel was called with; only where there is a kernel is the op put in."""
    CustomOp.register_oot(FastRotary, name="ApplyRotaryEmb")
    SHAPES.clear()
    return SHAPES


def build(config: str = "LlamaConfig", **changes: Any) -> Any:
    torch.manual_seed(0)
    arguments = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0, **changes,
    }  # fmt: skip
    if config == "MixtralConfig":
        arguments["num_local_experts"] = 4
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**arguments)
    ).eval()


def ids() -> torch.Tensor:
    return torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))


def logits(model: Any, **more: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=ids(), **more).logits
    return result


def attention_of(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].self_attn


@pytest.mark.parametrize("family", FAMILIES)
def test_families_rotate_by_the_op(family: str, rotated: Shapes) -> None:
    """Query and key of every layer go through the op, logits stay, and ungraft restores class and dictionary."""
    model = build(FAMILIES[family])
    before, attention = logits(model), attention_of(model)
    cls, attributes = type(attention), set(vars(attention))
    report = graft(model)
    rows = [row for row in report.replaced if row.op == "apply_rotary_emb"]
    assert [row.path for row in rows] == [
        f"model.layers.{i}.self_attn.apply_rotary_pos_emb" for i in range(2)
    ]
    assert rows[0].implementation.endswith("FastRotary.forward_oot")
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    assert sorted(rotated) == [(2, 7, 2, 16)] * 2 + [(2, 7, 4, 16)] * 2
    assert attention_of(model) is attention
    assert isinstance(attention, cls)
    assert (type(attention).__name__, type(attention).__module__) == (cls.__name__, cls.__module__)
    assert not [row for row in graft(model).replaced if row.op == "apply_rotary_emb"]
    ungraft(model)
    assert type(attention) is cls
    assert set(vars(attention)) == attributes
    assert torch.equal(logits(model), before)


def test_rows_with_positions_of_their_own(rotated: Shapes) -> None:
    """In a padded batch the rows of the tables differ; generation is the same."""
    model = build()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    before = model.generate(ids(), **options)
    graft(model)
    assert torch.equal(model.generate(ids(), **options), before)
    assert (14, 4, 16) in rotated


def test_other_models_are_not_touched(rotated: Shapes) -> None:
    """The function of the file and the class of other models stay what they are."""
    function, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    model, other = build(), build()
    graft(model)
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    logits(other)
    assert rotated == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])  # noqa: S301
def test_copies_have_an_op_of_their_own(duplicate: Callable[[Any], Any], rotated: Shapes) -> None:
    """A copy calls its own op, and is ungrafted alone."""
    model = build()
    expected = logits(model)
    graft(model)
    copied = duplicate(model)
    child = attention_of(copied).opgraft_rotary
    assert child is not attention_of(model).opgraft_rotary
    called: list[nn.Module] = []
    child.register_forward_hook(lambda module, *_: called.append(module))
    torch.testing.assert_close(logits(copied), expected)
    assert called == [child, child]
    ungraft(copied)
    assert type(attention_of(copied)) is modeling_llama.LlamaAttention
    assert "opgraft_rotary" in attention_of(model)._modules
    assert torch.equal(logits(copied), expected)


def test_a_pickle_is_read_in_another_process(tmp_path, warm_python) -> None:
    """A saved model finds its class again where it is loaded, and an op that is bound there."""
    program = (
        "import sys, torch, opgraft, transformers\n"
        "from opgraft.grafting.forwards import Substitution, substitute\n"
        "from opgraft.grafting.rotary import ADAPTER\n"
        "from opgraft.ops import ApplyRotaryEmb\n"
        "config = transformers.LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, "
        "num_key_value_heads=2, intermediate_size=8, vocab_size=9)\n"
        "ids = torch.arange(6)[None]\n"
        "if sys.argv[1] == 'save':\n"
        "    model = transformers.AutoModelForCausalLM.from_config(config).eval()\n"
        "    layer = model.model.layers[0].self_attn\n"
        "    row = Substitution('apply_rotary_pos_emb', ADAPTER.child, ADAPTER.substitute)\n"
        "    substitute(layer, ApplyRotaryEmb(), row)\n"
        "    torch.save((model, model(input_ids=ids).logits), sys.argv[2])\n"
        "else:\n"
        "    model, expected = torch.load(sys.argv[2], weights_only=False)\n"
        "    torch.testing.assert_close(model(input_ids=ids).logits, expected)\n"
        "    assert '_opgraft_forward' in vars(model.model.layers[0].self_attn)\n"
    )
    for step in ("save", "load"):
        subprocess.run([warm_python, "-c", program, step, str(tmp_path / "model.pt")], check=True)


def test_gradients_agree(rotated: Shapes) -> None:
    """Every parameter gets the gradient that it gets without grafting."""
    plain, model = build().train(), build().train()
    graft(model)
    for each in (plain, model):
        logits(each).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-4)
    assert rotated


@pytest.mark.slow
@pytest.mark.parametrize("config", ["LlamaConfig", "Gemma3TextConfig"])
def test_it_compiles_as_one_graph(config: str, rotated: Shapes) -> None:
    """The op is compiled with the model, for several lengths."""
    model = build(config, num_hidden_layers=1)
    graft(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (7, 5, 4):
        shorter = ids()[:, :length]
        torch.testing.assert_close(
            compiled(input_ids=shorter, use_cache=False).logits, model(shorter).logits
        )


def test_without_a_kernel_the_function_stays() -> None:
    """The native definition is no faster than what the file does, so nothing changes, and the report says so."""
    model = build()
    report = graft(model)
    assert "opgraft_rotary" not in attention_of(model)._modules
    (reason,) = {row.reason for row in report.left_alone if row.source == "apply_rotary_pos_emb"}
    assert reason == "here apply_rotary_emb is its native definition, which is no faster"


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin

    return turn(q), turn(k)


def promoted(q, k, cos, sin, unsqueeze_dim=1):
    rotated = ROTATE(q.float(), k.float(), cos, sin, unsqueeze_dim)
    return rotated[0].float(), rotated[1].float()


def other_arguments(q, k, cos, sin, section):
    return q, k


ROTATE = modeling_llama.apply_rotary_pos_emb
COUNTS: list[int] = []


def counting(q, k, cos, sin):
    COUNTS.append(1)
    return ROTATE(q, k, cos, sin)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            interleaved,
            "nothing in the model shows that its cosines and sines have each number twice",
        ),
        (
            promoted,
            "apply_rotary_pos_emb computes something else than apply_rotary_emb on a query and a key",
        ),
        (
            other_arguments,
            "apply_rotary_pos_emb computes something else than apply_rotary_emb on a query and a key",
        ),
        (counting, "counting uses COUNTS, and whoever reads that would miss its calls"),
    ],
)
def test_functions_that_compute_something_else_stay(
    function: Any, reason: str, rotated: Shapes, monkeypatch
) -> None:
    """Pairs of neighbours with tables for halves, another dtype, further arguments: the module keeps its class."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
    model = build()
    report = graft(model)
    assert "opgraft_rotary" not in attention_of(model)._modules
    assert {row.reason for row in report.left_alone if "rotary" in row.source} == {reason}


class Uneven(modeling_llama.LlamaRotaryEmbedding):
    """Tables whose halves differ, which the function takes as well."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos.cumsum(-1), sin


Uneven.__module__ = modeling_llama.__name__


def test_tables_that_do_not_repeat(rotated: Shapes) -> None:
    """Where the halves of the tables differ, or nothing in the model makes any, the function stays."""
    model = build()
    model.model.rotary_emb.__class__ = Uneven
    attention = nn.ModuleList([attention_of(build())])
    for each in (model, attention):
        report = graft(each)
        (reason,) = {row.reason for row in report.left_alone if "rotary" in row.source}
        assert (
            reason == "nothing in the model shows that its cosines and sines have each number twice"
        )
    assert not [row for row in report.replaced if row.op == "apply_rotary_emb"]


def test_a_forward_on_the_instance_stays(rotated: Shapes) -> None:
    """Code that set the forward of one module keeps it."""
    model = build()
    attention = attention_of(model)
    attention.forward = attention.forward
    report = graft(model)
    assert [
        row.reason
        for row in report.left_alone
        if row.path == "model.layers.0.self_attn.apply_rotary_pos_emb"
    ] == ["its forward was set on the instance"]
    assert len([row for row in report.replaced if row.op == "apply_rotary_emb"]) == 1


def test_unusual_calls_reach_the_function(rotated: Shapes) -> None:
    """Tables of another dtype, as under autocast, are left to the function of the file."""
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model)
        graft(model)
        torch.testing.assert_close(logits(model), before)
    assert rotated == []


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96,
}  # fmt: skip


def test_embeddings_of_time_are_no_tables(rotated: Shapes) -> None:
    """Voxtral has a module with frequencies that is called with times: it says nothing about tables of positions."""
    audio = {**SIZES, "num_key_value_heads": 4}
    config = transformers.VoxtralRealtimeConfig(
        text_config={**SIZES, "vocab_size": 99}, audio_config=audio
    )
    model = transformers.VoxtralRealtimeForConditionalGeneration(config)
    rows = [row.path for row in graft(model).replaced if row.op == "apply_rotary_emb"]
    assert rows == [
        f"model.{part}.layers.{i}.self_attn.apply_rotary_pos_emb"
        for part in ("audio_tower", "language_model")
        for i in range(2)
    ]


def test_types_of_layers_without_frequencies(rotated: Shapes) -> None:
    """Cohere's layers with full attention have no positions; tables are made for the others only."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.CohereCompassTextConfig(
        **SIZES, vocab_size=99, eos_token_id=2, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": rope, "full_attention": None},
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config).eval()
    before = model(input_ids=ids()).last_hidden_state
    assert [row.op for row in graft(model).replaced].count("apply_rotary_emb") == 2
    torch.testing.assert_close(model(input_ids=ids()).last_hidden_state, before, atol=1e-5, rtol=0)
    assert rotated


def test_tables_for_more_tokens_than_there_are_queries(rotated: Shapes) -> None:
    """A draft model attends to states of another model: keys have more positions than queries."""
    config = transformers.MuseGlimmerAssistantConfig(**SIZES, target_layer_ids=[1, 2])
    model = transformers.AutoModel.from_config(config).eval()
    x, context = torch.randn(1, 4, 64), torch.randn(1, 3, 128)
    before = model(x, context).last_hidden_state
    graft(model)
    torch.testing.assert_close(model(x, context).last_hidden_state, before, atol=1e-5, rtol=0)


class OfLength(nn.Module):
    """Frequencies, and a forward that takes a length."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(torch.rand(4), persistent=False)

    def forward(self, seq_len: int) -> torch.Tensor:
        return torch.outer(torch.arange(seq_len), self.inv_freq)


class Raising(OfLength):
    """Frequencies, and a forward that cannot be called with positions."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        raise SystemExit("no such device")


OfLength.__module__ = Raising.__module__ = modeling_llama.__name__


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        (OfLength, "nothing in the model shows that its cosines and sines have each number twice"),
        (
            Raising,
            f"adapter {ADAPTER.name!r} of opgraft {opgraft.__version__} raised SystemExit: no such device",
        ),
    ],
)
def test_what_recognition_of_tables_raises(
    embedding: type[nn.Module], reason: str, rotated: Shapes
) -> None:
    """Code of the model that raises when it is tried leaves the function where it is, with the reason."""
    model = build()
    attention = nn.ModuleList([attention_of(model), embedding()])
    report = graft(attention)
    assert [row.reason for row in report.left_alone if "rotary" in row.source] == [reason]
    assert "opgraft_rotary" not in attention[0]._modules


def test_attention_and_rotary_in_two_steps(rotated: Shapes) -> None:
    """A forward whose attention is an op already gets the rotary op beside it, and ungraft takes both."""
    CustomOp.unregister_oot(FastRotary)
    model = build()
    expected = logits(model)
    graft(model)
    assert "opgraft_rotary" not in attention_of(model)._modules
    CustomOp.register_oot(FastRotary, name="ApplyRotaryEmb")
    assert [row.op for row in graft(model).replaced] == ["apply_rotary_emb"] * 2
    assert {"opgraft_rotary", "opgraft_attention"} < attention_of(model)._modules.keys()
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    assert rotated
    ungraft(model)
    assert type(attention_of(model)) is modeling_llama.LlamaAttention
    assert torch.equal(logits(model), expected)
