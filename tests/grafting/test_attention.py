"""Grafting attention of transformers: the op stands where the forward finds sdpa."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from opgraft import graft, ungraft
from opgraft.grafting import attention
from opgraft.grafting.attention import ADAPTER
from opgraft.ops import ScaledDotProductAttention
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

LAST = 0

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED_HEADS = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}


def build(config: str = "LlamaConfig", **changes: Any) -> Any:
    """A causal language model of two layers with random weights."""
    torch.manual_seed(0)
    arguments = {**SHARED_HEADS, **changes}
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**arguments)
    ).eval()


def ids() -> torch.Tensor:
    return torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=ids()).logits
    return result


def test_masks_reach_the_attention_op() -> None:
    """With padding, with sliding windows and in one-token steps the grafted attention agrees with transformers'."""
    for config in ("LlamaConfig", "MistralConfig", "Gemma3TextConfig", "BertConfig"):
        model = build(config, is_decoder=True, sliding_window=4)
        before = model(**padded()).logits
        graft(model)
        torch.testing.assert_close(model(**padded()).logits, before, atol=1e-5, rtol=0)


def test_generation_with_a_static_cache() -> None:
    """A cache that is longer than the prompt, in which causal attention must not see the empty rest, works too."""
    model = build()
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
    }
    options |= {"disable_compile": True, "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    before = model.generate(ids(), **options)
    graft(model)
    assert torch.equal(model.generate(ids(), **options), before)


def test_another_model_with_the_same_configuration_keeps_its_attention() -> None:
    """Models that share a configuration object do not share ops: neither notices what becomes of the other."""
    model = build()
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    before = logits(other)
    graft(model)
    assert model.config is other.config
    assert torch.equal(logits(other), before)
    graft(other)
    ungraft(model)
    assert torch.equal(logits(model), before)
    torch.testing.assert_close(logits(other), before)
    assert (
        Counter("opgraft_attention" in dict(part.named_children()) for part in other.modules())[
            True
        ]
        == 2
    )
    assert not any("opgraft" in name for name, _ in model.named_modules())


def test_eager_attention_and_instance_forwards_stay() -> None:
    """Attention is switched only where sdpa was chosen and the class's own forward runs."""
    report = graft(build(attn_implementation="eager"))
    assert {row.reason for row in report.left_alone if row.source == "LlamaAttention"} == {
        "its attention implementation is 'eager', not 'sdpa'"
    }
    model = build()
    layer = model.model.layers[0].self_attn
    layer.forward = type(layer).forward.__get__(layer)
    report = graft(model)
    assert [row.path for row in report.replaced if "attention" in row.op] == [
        "model.layers.1.self_attn"
    ]
    ungraft(model)
    assert model.config._attn_implementation == "sdpa"


class Counting(LlamaAttention):
    """Attention that writes to a name of its file."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        global LAST  # that is what it is about
        LAST += 1
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not None
        return super().forward(hidden_states, *args, **kwargs)


def test_attention_that_writes_to_a_name_of_its_file_stays() -> None:
    """A forward with a namespace of its own would write there, where nobody reads it."""
    model = build()
    model.model.layers[0].self_attn.__class__ = Counting
    report = graft(model)
    assert {row.reason for row in report.left_alone if row.source == "Counting"} == {
        "its forward writes to LAST"
    }
    before = LAST
    logits(model)
    assert before + 1 == LAST


def test_classes_of_grafted_modules_are_not_kept_alive() -> None:
    """A class that was defined in a function goes with the model, whether that was ungrafted or not."""
    gone = []
    for back in (True, False):

        class Local(LlamaAttention):
            """Attention that nobody else has."""

        model = build()
        model.model.layers[0].self_attn.__class__ = Local
        assert "model.layers.0.self_attn" in [row.path for row in graft(model).replaced]
        logits(model)
        if back:
            ungraft(model)
        gone.append(weakref.ref(Local))
        del model, Local
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_what_is_patched_into_the_file_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the forward after ungraft only, as the report says."""
    model, called = build(), []
    report = graft(model)
    assert (
        report.notes[-1] == "2 of the forwards call ops in place of functions of their files: "
        "if you patch such a function from now on, call ungraft first"
    )
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: called.append(1) or (q, k)
    )
    logits(model)
    assert called == []
    ungraft(model)
    logits(model)
    assert called == [1, 1]


def test_the_configuration_keeps_its_name() -> None:
    """Nobody who reads the name of the implementation sees a difference, and no name is added to transformers."""
    model = build()
    names = sorted(transformers.AttentionInterface()), sorted(transformers.AttentionMaskInterface())
    assert "scaled_dot_product_attention" in {row.op for row in graft(model).replaced}
    assert model.config._attn_implementation == "sdpa"
    assert (
        sorted(transformers.AttentionInterface()),
        sorted(transformers.AttentionMaskInterface()),
    ) == names
    again = type(model)(pickle.loads(pickle.dumps(model.config)))  # noqa: S301
    assert again.config._attn_implementation == "sdpa"
    assert not any("opgraft" in name for name, _ in again.named_modules())


def test_another_implementation_is_chosen_while_grafted() -> None:
    """What set_attn_implementation chooses is what runs, and sdpa is the op again when it is chosen again."""
    model, plain = build(), build()
    graft(model)
    called: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, ScaledDotProductAttention):
            module.register_forward_hook(lambda op, *_: called.append(op))
    for implementation, calls in (("eager", 0), ("sdpa", 2)):
        model.set_attn_implementation(implementation)
        plain.set_attn_implementation(implementation)
        torch.testing.assert_close(logits(model), logits(plain), atol=1e-5, rtol=0)
        assert len(called) == calls


def test_continuous_batching_takes_a_grafted_model() -> None:
    """The cache that transformers pages itself reaches transformers' own function, and its answers stay."""
    model = build()
    config = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)

    def answers() -> list[list[int]]:
        rows = model.generate_batch([[5, 6, 7, 8], [9, 10, 11]], config, small, warmup=False)
        return [row.generated_tokens for row in rows.values()]

    expected = answers()
    graft(model)
    assert answers() == expected
    assert [len(tokens) for tokens in expected] == [4, 4]


def test_sdpa_that_other_code_has_replaced_stays(monkeypatch) -> None:
    """If sdpa no longer means transformers' own function, the attention that was asked for is kept."""
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "sdpa", lambda *args, **kwargs: None
    )
    report = graft(build())
    assert {row.reason for row in report.left_alone if row.source == "LlamaAttention"} == {
        "other code has registered its own 'sdpa' attention"
    }


def test_features_of_transformers_function_are_left_to_it() -> None:
    """What the op was not made for, such as a position bias, is computed by transformers' own function."""

    class Refusing(ScaledDotProductAttention):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise AssertionError("the op was called")

    plain = transformers.AttentionInterface()
    interface = ADAPTER.substitute(Refusing(), plain)
    module = nn.Module()
    query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
    bias = torch.randn(1, 4, 3, 3)
    arguments = (module, query, key, value, None)
    expected, _ = plain["sdpa"](*arguments, position_bias=bias)
    assert torch.equal(interface["sdpa"](*arguments, position_bias=bias)[0], expected)
    with pytest.raises(ValueError, match="softcap"):
        interface["sdpa"](*arguments, softcap=30.0)
    with pytest.raises(AssertionError, match="the op was called"):
        interface["sdpa"](*arguments, position_bias=None, output_attentions=False, sliding_window=4)


@pytest.mark.parametrize("masked", [False, True, "per head"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 5), (3, 5)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("value_size", [8, 6])
def test_the_attention_function_agrees_with_transformers(
    masked, queries, keys, groups, value_size
) -> None:
    """Over masks, lengths, shared heads and head sizes, causal or not, both functions return the same."""
    plain = transformers.AttentionInterface()
    interface = ADAPTER.substitute(ScaledDotProductAttention(), plain)
    module = nn.Module()
    module.num_key_value_groups = groups
    query, key = torch.randn(2, 4, queries, 8), torch.randn(2, 4 // groups, keys, 8)
    value = torch.randn(2, 4 // groups, keys, value_size)
    mask = (
        torch.rand(2, 4 if masked == "per head" else 1, queries, keys).round().bool()
        if masked
        else None
    )
    if mask is not None:
        mask[..., 0] = True
    for is_causal in (None, True, False):
        expected, _ = plain["sdpa"](
            module, query, key, value, mask, scaling=0.3, is_causal=is_causal
        )
        mine, weights = interface["sdpa"](
            module, query, key, value, mask, scaling=0.3, is_causal=is_causal
        )
        assert weights is None
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


def test_nested_configurations_are_switched_one_by_one() -> None:
    """In a model of several parts only those with sdpa change, and each gets back what it had."""
    vision = {
        key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    config = transformers.Gemma3Config(
        text_config={**SHARED_HEADS},
        vision_config={**vision, "image_size": 16, "patch_size": 8, "intermediate_size": 128},
        mm_tokens_per_image=4,
        attn_implementation={"": "sdpa", "text_config": "sdpa", "vision_config": "eager"},
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before[1:] == ["sdpa", "eager"]
    report = graft(model)
    attended = [row.path for row in report.replaced if "attention" in row.op]
    assert attended
    assert all("language_model" in path for path in attended)
    assert [part._attn_implementation for part in parts] == before
    ungraft(model)
    assert [part._attn_implementation for part in parts] == before


def test_a_saved_model_runs_in_a_new_process(tmp_path, warm_python) -> None:
    """A pickled grafted model attends by its ops where it is loaded, and is ungrafted there."""
    model = build()
    graft(model)
    torch.save((model, {"input_ids": ids()}, logits(model)), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.testing.assert_close(model(**inputs).logits, expected)\n"
        "from opgraft import ungraft\n"
        "assert any('opgraft_attention' in name for name, _ in model.named_modules())\n"
        "ungraft(model)\n"
        "assert not any('opgraft' in name for name, _ in model.named_modules())\n"
        "torch.testing.assert_close(model(**inputs).logits, expected)\n"
    )
    subprocess.run([warm_python, "-c", program, str(tmp_path / "model.pt")], check=True)


def test_dropout_in_training_draws_the_same_numbers() -> None:
    """Attention dropout applies in training and only there."""
    model = build(attention_dropout=0.5).train()
    torch.manual_seed(4)
    before = logits(model)
    graft(model)
    torch.manual_seed(4)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    assert torch.equal(logits(model), logits(model))


def test_attention_with_a_position_bias_stays() -> None:
    """T5 adds a bias to its scores in every layer, which only transformers' own function knows."""
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=99
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    report = graft(model)
    assert {row.reason for row in report.left_alone if row.source == "T5Attention"} == {
        "it adds a position bias, which the attention op does not take"
    }


def test_attention_with_parameters_of_its_own_has_one_row() -> None:
    """A module is either replaced or left alone, and for one reason."""
    report = graft(build("GptOssConfig", num_local_experts=4))
    rows = [row.reason for row in report.left_alone if row.path == "model.layers.0.self_attn"]
    assert rows == ["its attention implementation is 'eager', not 'sdpa'"]


def test_keys_and_values_with_other_numbers_of_heads() -> None:
    """The op, which shares heads between the two, leaves such a call to transformers' own function."""
    module = nn.Module()
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 4, 5, 8)
    called = []

    def sdpa(
        module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        called.append(query)
        return query, None

    found, _ = attention.attention(
        ScaledDotProductAttention(), sdpa, (), module, query, key, value, None
    )
    assert called == [query]
    assert found is query
