"""Latent attention gives what its definition says, expanded or absorbed, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.errors import LayerError
from opgraft.ops import (
    ColumnParallelLinear,
    MLAAttention,
    MLAModules,
    MultiHeadLatentAttentionWrapper,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    get_rope,
)
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.quantization import quantizations
from torch import Tensor, nn

HEADS, NOPE, ROPE, VALUE, RANK = 3, 10, 6, 8, 20
BLOCK = 4
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 2e-2},
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(dtype)


def layer_of(
    value: int = VALUE, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> MLAAttention:
    config = quantizations()[quantization].from_config({}) if quantization else None
    proj = ColumnParallelLinear(
        RANK,
        HEADS * (NOPE + value),
        bias=False,
        params_dtype=dtype,
        quant_config=config,
        prefix="kv_b_proj",
    )
    weight = drawn(HEADS * (NOPE + value), RANK, seed=4, dtype=dtype) / 4
    proj.weight.weight_loader(proj.weight, weight)
    proj.process_weights_after_loading()
    return MLAAttention(HEADS, 0.3, NOPE, ROPE, value, None, RANK, proj, prefix="attn")


def arguments(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (tokens, HEADS, NOPE + ROPE), (tokens, RANK), (tokens, ROPE)
    return [drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def reference(
    weight: Tensor, query: Tensor, kv_c: Tensor, k_pe: Tensor, value: int = VALUE
) -> Tensor:
    """Attend in float64, one query and head at a time, over keys and values that each latent is expanded to."""
    w, q, c, pe = (x.double() for x in (weight.view(HEADS, NOPE + value, RANK), query, kv_c, k_pe))
    out = torch.zeros(len(q), HEADS, value, dtype=torch.float64)
    for token in range(len(q)):
        for head in range(HEADS):
            keys = torch.cat((c[: token + 1] @ w[head, :NOPE].T, pe[: token + 1]), dim=1)
            scores = (keys @ q[token, head] * 0.3).exp()
            out[token, head] = scores / scores.sum() @ (c[: token + 1] @ w[head, NOPE:].T)
    return out.flatten(1)


def batch_of(
    lengths: Sequence[int], before: Sequence[int], tables: Sequence[Sequence[int]], cache: Tensor
) -> AttentionBatch:
    so_far = [old + new for old, new in zip(before, lengths, strict=True)]
    return AttentionBatch.of_sequences(
        lengths, so_far, torch.tensor(tables), {"attn": cache}, block_size=BLOCK
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("value", [VALUE, NOPE + ROPE, 30])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_one_sequence(tokens: int, value: int, dtype: torch.dtype) -> None:
    """Without a batch all tokens are one sequence, whatever the size of a value head."""
    layer, given = layer_of(value, dtype), arguments(tokens, dtype)
    found = layer(*given)
    assert found.dtype == dtype
    expected = reference(layer.kv_b_proj.weight, *given, value=value)
    torch.testing.assert_close(found.double(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("absorbs", [True, False, None])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_chunks(absorbs: bool | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside single tokens give what each sequence gives at once, absorbed, expanded, or as the layer decides.

    Rows of the cache that belong to nobody are not read and not written.
    """
    layer, lengths = layer_of(dtype=dtype), {0: 13, 1: 9}
    if absorbs is not None:
        monkeypatch.setattr(type(layer), "_gains_by_expansion", lambda self, chunk: not absorbs)
    cache = torch.full(layer.kv_cache_shape(9, BLOCK), torch.nan, dtype=dtype)
    tables, done = {0: [5, 1, 7, 2], 1: [8, 0, 3, 3]}, {0: 0, 1: 0}
    texts = {0: arguments(13, dtype), 1: [x.flip(0) for x in arguments(9, dtype)]}
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    for chunks in ({0: 5, 1: 1}, {1: 3, 0: 1}, {0: 0, 1: 4}, {0: 1, 1: 1}, {0: 6}):
        parts = [
            [x[done[row] : done[row] + size] for x in texts[row]] for row, size in chunks.items()
        ]
        batch = batch_of(
            list(chunks.values()),
            [done[row] for row in chunks],
            [tables[row] for row in chunks],
            cache,
        )
        with attending(batch):
            out = layer(*(torch.cat(x) for x in zip(*parts, strict=True)))
        for (row, size), part in zip(chunks.items(), out.split(list(chunks.values())), strict=True):
            found[row].append(part)
            done[row] += size
    for row, text in texts.items():
        expected = reference(layer.kv_b_proj.weight, *text)
        torch.testing.assert_close(torch.cat(found[row]).double(), expected, **TOLERANCES[dtype])
        rows = cache[tables[row]].flatten(0, 1)[: lengths[row]]
        assert torch.equal(rows, torch.cat(text[1:], dim=1))
    assert cache[[4, 6]].isnan().all()
    assert cache[2, 1:].isnan().all()


def test_single_tokens_are_absorbed_and_prompts_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes through the projection whole, a token behind a long text does not."""
    layer, expanded = layer_of(), []
    cache = torch.zeros(layer.kv_cache_shape(20, BLOCK))
    layer.kv_b_proj.register_forward_hook(lambda *_: expanded.append(1))
    table = [list(range(20))]
    for count, before, times in ((60, 0, 1), (1, 60, 1), (2, 61, 1)):
        with attending(batch_of([count], [before], table, cache)):
            layer(*arguments(count))
        assert len(expanded) == times


def test_the_cache_has_a_latent_and_a_key_of_each_token() -> None:
    """Nothing else: heads and values take no memory of their own."""
    assert layer_of().kv_cache_shape(7, 32) == (7, 32, RANK + ROPE)
    assert not layer_of().holds_codes()


def test_a_quantized_projection() -> None:
    """Of a weight in codes, keys are absorbed as they would be expanded."""
    layer, given = layer_of(quantization="int8"), arguments(9)
    cache = torch.zeros(layer.kv_cache_shape(3, BLOCK))
    expected = layer(*given)
    with attending(batch_of([8], [0], [[0, 1, 2]], cache)):
        layer(*(x[:8] for x in given))
    with attending(batch_of([1], [8], [[0, 1, 2]], cache)):
        found = layer(*(x[8:] for x in given))
    torch.testing.assert_close(found, expected[8:], **TOLERANCES[torch.float32])


def write(layer: MLAAttention) -> None:
    with torch.no_grad():
        layer.kv_b_proj.weight.mul_(2)


def replace(layer: MLAAttention) -> None:
    layer.kv_b_proj.weight = nn.Parameter(layer.kv_b_proj.weight.detach() * 2)


def move(layer: MLAAttention) -> None:
    layer.kv_b_proj.weight.data = layer.kv_b_proj.weight.detach() * 2


@pytest.mark.parametrize("change", [write, replace, move])
def test_a_new_weight(change: Callable[[MLAAttention], None]) -> None:
    """Absorbed tokens are computed with the weight as it is, as prompts are, whatever way it has changed."""
    layer, (query, kv_c, k_pe) = layer_of(), arguments(1)

    def attended() -> Tensor:
        cache = torch.zeros(layer.kv_cache_shape(1, BLOCK))
        with torch.no_grad(), attending(batch_of([1], [0], [[0]], cache)):
            result: Tensor = layer(query, kv_c, k_pe)
        return result

    before = attended()
    torch.testing.assert_close(before, reference(layer.kv_b_proj.weight, query, kv_c, k_pe).float())
    kept = layer.get_buffer("_to_key")
    assert torch.equal(attended(), before)
    assert layer.get_buffer("_to_key") is kept
    change(layer)
    torch.testing.assert_close(attended(), before * 2)


def test_a_weight_made_in_inference_mode() -> None:
    """Writes to it are not counted: what is kept of it is made anew when a new weight is processed."""
    with torch.inference_mode():
        layer, given, cache = layer_of(), arguments(1), torch.zeros(1, BLOCK, RANK + ROPE)
        with attending(batch_of([1], [0], [[0]], cache)):
            before = layer(*given)
            layer.kv_b_proj.weight.mul_(2)
            assert torch.equal(layer(*given), before)
            layer.process_weights_after_loading()
            torch.testing.assert_close(layer(*given), before * 2)


def test_gradients() -> None:
    """They reach queries, latents and keys."""
    layer = layer_of(dtype=torch.float64)
    given = [x.requires_grad_() for x in arguments(5, torch.float64)]
    assert torch.autograd.gradcheck(layer, given)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({0: torch.zeros(3, HEADS, NOPE)}, r"q has shape \(3, 3, 10\), expected \[3, 3, 16\]"),
        ({1: torch.zeros(2, RANK)}, r"kv_c_normed has shape \(2, 20\), expected \[3, 20\]"),
        ({2: torch.zeros(3, 2, ROPE)}, r"k_pe has shape \(3, 2, 6\), expected \[3, 1, 6\]"),
    ],
)
def test_shapes_that_do_not_fit(changed: dict[int, Tensor], words: str) -> None:
    """The argument is named."""
    given = arguments(3)
    for place, x in changed.items():
        given[place] = x
    with pytest.raises(ValueError, match=words):
        layer_of()(*given)


def test_a_bias_cannot_be_absorbed() -> None:
    """The projection of keys and values has none."""
    with pytest.raises(LayerError, match="kv_b_proj has a bias"):
        MLAAttention(
            HEADS,
            0.3,
            NOPE,
            ROPE,
            VALUE,
            None,
            RANK,
            nn.Linear(RANK, HEADS * (NOPE + VALUE)),
            prefix="attn",
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"query": torch.zeros(2, HEADS, 25)},
            r"query has shape .*, expected \[tokens, num_heads, size\]",
        ),
        (
            {"cache": torch.zeros(3, BLOCK, 26).double()},
            "cache is torch.float64, expected torch.float32",
        ),
        ({"kv_lora_rank": 27}, "kv_lora_rank is 27, expected at most 26"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0, expected a positive"),
        ({"query_start_loc": torch.tensor([0, 1])}, "query_start_loc is .*ascend from 0 to 2"),
        ({"seq_lens": torch.tensor([13])}, "at most 12 as in 3 blocks of 4"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "block_table has shape"),
    ],
)
def test_the_form_refuses(changed: dict[str, Any], words: str) -> None:
    """What does not fit is named."""
    given = {
        "query": drawn(2, HEADS, RANK + ROPE),
        "cache": drawn(3, BLOCK, RANK + ROPE),
        "block_table": torch.tensor([[2, 0, 1]]),
        "query_start_loc": torch.tensor([0, 2]),
        "seq_lens": torch.tensor([9]),
        "kv_lora_rank": RANK,
        "scale": 0.3,
    }
    assert functional.mla_paged_attention(**given).shape == (2, HEADS, RANK)
    with pytest.raises(ValueError, match=words):
        functional.mla_paged_attention(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"k_pe": torch.zeros(3, ROPE)}, r"k_pe \(3, 6\)"),
        (
            {"cache": torch.zeros(3, BLOCK, RANK)},
            r"cache has shape .*, expected \[num_blocks, block_size, 26\]",
        ),
        ({"slots": torch.tensor([0, 12])}, "slots reach from 0 to 12, expected 0 to 11"),
        ({"slots": torch.tensor([0.0, 1.0])}, "slots are torch.float32"),
        ({"cache": torch.zeros(3, BLOCK, RANK + ROPE).half()}, "cache is torch.float16"),
    ],
)
def test_writing_refuses(changed: dict[str, Any], words: str) -> None:
    """What does not fit is named, and nothing is written."""
    cache = torch.zeros(3, BLOCK, RANK + ROPE)
    given = {
        "kv_c": drawn(2, RANK),
        "k_pe": drawn(2, ROPE),
        "cache": cache,
        "slots": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=words):
        functional.concat_and_cache_mla(**{**given, **changed})
    assert not cache.any()


def modules(**changed: Any) -> MLAModules:
    """The modules of a layer without latent queries, which return their biases as vLLM's do."""
    given: dict[str, Any] = {
        "kv_a_layernorm": RMSNorm(RANK),
        "kv_b_proj": ColumnParallelLinear(RANK, HEADS * (NOPE + VALUE), bias=False),
        "rotary_emb": get_rope(ROPE, 32, is_neox_style=False),
        "o_proj": RowParallelLinear(HEADS * VALUE, 12, bias=False),
        "q_proj": ColumnParallelLinear(12, HEADS * (NOPE + ROPE), bias=False),
        "kv_a_proj_with_mqa": ReplicatedLinear(12, RANK + ROPE, bias=False),
    }
    made = {**given, **changed}
    for module in filter(None, made.values()):
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            parameter.data = drawn(*parameter.shape, seed=len(name)) / 3
    return MLAModules(**made)


def wrapper(**changed: Any) -> MultiHeadLatentAttentionWrapper:
    return MultiHeadLatentAttentionWrapper(
        12, HEADS, 0.3, NOPE, ROPE, VALUE, None, RANK, modules(**changed)
    )


@torch.no_grad()
def test_the_wrapper_projects_rotates_scales_and_gates() -> None:
    """It gives what its modules give one after another, with a scale of queries and a gate of values."""
    parts = modules(g_proj=ColumnParallelLinear(12, HEADS * VALUE, bias=False))
    layer = MultiHeadLatentAttentionWrapper(12, HEADS, 0.3, NOPE, ROPE, VALUE, None, RANK, parts)
    hidden, positions, scaling = drawn(7, 12), torch.arange(7), drawn(7, 1, 1).abs()
    query = parts.q_proj(hidden)[0].view(7, HEADS, NOPE + ROPE)
    latents, key = parts.kv_a_proj_with_mqa(hidden)[0].split([RANK, ROPE], dim=1)
    rotated, key = parts.rotary_emb(positions, query[..., NOPE:].contiguous(), key.contiguous())
    query = torch.cat((query[..., :NOPE], rotated), dim=-1) * scaling
    values = reference(
        parts.kv_b_proj.weight, query, parts.kv_a_layernorm(latents.contiguous()), key
    )
    expected = parts.o_proj(values.float() * parts.g_proj(hidden)[0].sigmoid())[0]
    torch.testing.assert_close(
        layer(positions, hidden, scaling), expected, **TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q_proj": None}, "q_proj is None, and q_lora_rank is None"),
        ({"is_sparse": True}, "is to be sparse, which is not written"),
    ],
)
def test_modules_that_do_not_fit(changed: dict[str, Any], words: str) -> None:
    """What is missing, and what is not written, is named."""
    with pytest.raises(LayerError, match=words):
        wrapper(**changed)


def test_a_projection_of_another_size() -> None:
    """Queries that are not those of the heads are refused with both sizes."""
    layer = wrapper(q_proj=ColumnParallelLinear(12, HEADS * NOPE, bias=False))
    size = HEADS * (NOPE + ROPE)
    with pytest.raises(
        ValueError, match=f"what q_proj gives has shape .*, expected a last dimension of {size}"
    ):
        layer(torch.arange(7), drawn(7, 12))
