"""The ways in which rotary functions of transformers pair elements, recognised by running them."""

from __future__ import annotations

import gc
import importlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import graft, ungraft
from opgraft.grafting.rotations import Rotation, rotation_of
from opgraft.ops import ApplyRotaryEmb, CustomOp
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

HALVES = Rotation(interleaved=False, to_halves=False, table_in_pairs=False, partial=False)
ROTATIONS = {
    "llama": HALVES,
    "olmo": HALVES,
    "modernbert": HALVES,
    "gpt_neox": Rotation(interleaved=False, to_halves=False, table_in_pairs=False, partial=True),
    "glm": Rotation(interleaved=True, to_halves=False, table_in_pairs=False, partial=True),
    "ernie4_5": Rotation(interleaved=True, to_halves=False, table_in_pairs=False, partial=False),
    "cohere": Rotation(interleaved=True, to_halves=False, table_in_pairs=True, partial=False),
    "deepseek_v3": Rotation(interleaved=True, to_halves=True, table_in_pairs=False, partial=False),
}


def function_of(family: str) -> Callable[..., Any]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = "apply_rotary_pos_emb_interleave" if family == "deepseek_v3" else "apply_rotary_pos_emb"
    function: Callable[..., Any] = getattr(module, name)
    return function


@pytest.mark.parametrize("family", ROTATIONS)
def test_functions_of_transformers(family: str) -> None:
    """Each way is told from the others."""
    assert rotation_of(function_of(family)) == ROTATIONS[family]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ROTATIONS)
def test_the_op_computes_the_same(family: str, batch: int, dtype: torch.dtype) -> None:
    """By the op, query and key are what the function makes of them, at odd sizes, with gradients."""
    rotation, function = ROTATIONS[family], function_of(family)
    op = ApplyRotaryEmb(is_neox_style=rotation.is_neox_style())
    generator = torch.Generator().manual_seed(7)
    angles = torch.randn(batch, 5, 3, generator=generator)
    angles = angles.repeat_interleave(2, -1) if rotation.table_in_pairs else angles.repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    size = 6 + 4 * rotation.partial
    heads = [
        torch.randn(3, n, 5, size, generator=generator).to(dtype).requires_grad_() for n in (3, 1)
    ]
    wanted = function(*heads, cos, sin)
    assert all(rotation.fits(x, cos) for x in heads)
    assert rotation.repeats(cos)
    found = tuple(rotation.apply(op, x, cos, sin) for x in heads)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    gradients = [
        torch.autograd.grad(sum(y.float().sin().sum() for y in out), heads)
        for out in (found, wanted)
    ]
    torch.testing.assert_close(*gradients, atol=10 * tolerance, rtol=10 * tolerance)


def turned_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return function_of("llama")(q, k, cos, -sin)


def query_only(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return function_of("glm")(q, k, cos, sin)[0], k


def raises(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    raise RuntimeError("not today")


def otherwise_for_one_token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return (q, k) if q.shape[2] == 1 else function_of("llama")(q, k, cos, sin)


def otherwise_for_many_tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return (q, k) if q.shape[2] > 4096 else function_of("llama")(q, k, cos, sin)


@pytest.mark.parametrize(
    "function",
    [
        turned_back,
        query_only,
        raises,
        lambda q, k, cos, sin: (q, k),
        otherwise_for_one_token,
        otherwise_for_many_tokens,
    ],
)
def test_what_is_nearly_a_rotation_is_none(function: Callable[..., Any]) -> None:
    """Another sign, a key left as it is, or an error: no rotation is found."""
    assert rotation_of(function) is None


def test_functions_that_were_asked_about_are_not_kept_alive() -> None:
    """A function that its file has forgotten goes, with all that it encloses."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return function_of("llama")(q, k, cos, sin)

    assert rotation_of(function) == HALVES
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


def test_what_does_not_fit_is_told() -> None:
    """A table that is longer than the heads, or of another dtype or number of tokens, does not fit."""
    heads, table = torch.zeros(2, 3, 5, 8), torch.zeros(1, 5, 8)
    partial = ROTATIONS["glm"]
    assert HALVES.fits(heads, table)
    assert partial.fits(heads, table[..., :4])
    assert not HALVES.fits(heads, table[..., :4])
    for other in (
        torch.zeros(1, 5, 10),
        table.double(),
        torch.zeros(1, 4, 8),
        torch.zeros(5, 8),
        torch.zeros(3, 5, 8),
    ):
        assert not partial.fits(heads, other)
    assert not HALVES.repeats(torch.rand(1, 5, 8))


PAIRINGS = {
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "cohere": ("CohereConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        }
        | {"qk_nope_head_dim": 8, "first_k_dense_replace": 2},
    ),
}


@pytest.mark.parametrize("family", PAIRINGS)
def test_models_rotate_by_the_op(family: str) -> None:
    """A model with such a function rotates by the op, with the same logits, and comes back."""

    @CustomOp.register_oot(name="ApplyRotaryEmb")
    class FastRotary(ApplyRotaryEmb):
        def forward_oot(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward_native(*args, **kwargs)

    transformers = importlib.import_module("transformers")
    name, more = PAIRINGS[family]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "intermediate_size": 96,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**{**sizes, **more})
    ).eval()
    ids = torch.randint(3, 99, (2, 7))
    before, cls = model(input_ids=ids).logits, type(model.model.layers[0].self_attn)
    rows = [row for row in graft(model).replaced if row.op == "apply_rotary_emb"]
    assert len(rows) == 2
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-5, rtol=0)
    ungraft(model)
    assert type(model.model.layers[0].self_attn) is cls
    assert torch.equal(model(input_ids=ids).logits, before)
