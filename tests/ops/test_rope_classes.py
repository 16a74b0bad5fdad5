"""Rotary embeddings for longer contexts and for images, and the way from a model's parameters to one."""

from __future__ import annotations

import math
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from opgraft import ops
from torch import Tensor
from transformers import HunYuanDenseV1Config, Llama4VisionConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan
from transformers.models.llama4 import modeling_llama4 as llama4

HEAD_SIZE, TRAINED, BASE = 48, 512, 50000.0
PLAIN = [HEAD_SIZE, HEAD_SIZE, TRAINED, BASE, True]
PAIRS = HEAD_SIZE // 2
SHORT, LONG = [1.0 + i / 50 for i in range(PAIRS)], [1.0 + i for i in range(PAIRS)]


def table(frequencies: Tensor, positions: Tensor, scale: float = 1.0) -> Tensor:
    """Cosines and sines in float64."""
    angles = positions.double()[:, None] * frequencies.double()
    return torch.cat((angles.cos(), angles.sin()), -1) * scale


def assert_table(
    rows: Tensor, frequencies: Tensor, count: int, scale: float = 1.0, *, slower: float = 1.0
) -> None:
    """The rows are those of positions from 0, divided by ``slower``, up to float32's rounding of angles."""
    expected = table(frequencies, torch.arange(count) / slower, scale)
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=count * 1e-6)


def plain_frequencies(base: float = BASE) -> Tensor:
    """``θ`` in float64."""
    return torch.tensor([base ** (-2 * i / HEAD_SIZE) for i in range(PAIRS)], dtype=torch.float64)


def of_transformers(kind: str, length: int | None = None, **rope: Any) -> tuple[Tensor, float]:
    """Frequencies and scale of transformers, for a context of that length."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, max_position_embeddings=TRAINED
    )
    config.rope_parameters = {"rope_type": kind, "rope_theta": BASE, **rope}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    return frequencies, float(scale)


def test_linear_scaling() -> None:
    """Positions are divided by each factor; the tables follow each other, and offsets tell where they begin."""
    op = ops.LinearScalingRotaryEmbedding(*PLAIN, [1.0, 4.0, 2.5], torch.float32)
    assert op.scaling_factor_to_offset == {1.0: 0, 4.0: TRAINED, 2.5: 5 * TRAINED}
    for factor, start in op.scaling_factor_to_offset.items():
        count = int(TRAINED * factor)
        assert_table(
            op.cos_sin_cache[start : start + count], plain_frequencies(), count, slower=factor
        )
    one = ops.LinearScalingRotaryEmbedding(*PLAIN, 4, torch.float32)
    assert_table(one.cos_sin_cache, of_transformers("linear", factor=4.0)[0], 4 * TRAINED)


@pytest.mark.parametrize(("positions", "trained"), [(4 * TRAINED, TRAINED), (TRAINED, TRAINED)])
def test_dynamic_ntk(positions: int, trained: int) -> None:
    """The base is that of transformers for a context of all positions."""
    sizes = (HEAD_SIZE, HEAD_SIZE, positions, trained, BASE, True)
    op = ops.DynamicNTKScalingRotaryEmbedding(*sizes, 2.0, torch.float32)
    assert_table(op.cos_sin_cache, of_transformers("dynamic", positions, factor=2.0)[0], positions)


def test_dynamic_ntk_alpha() -> None:
    """The base is that of Hunyuan's models."""
    config = HunYuanDenseV1Config(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, head_dim=HEAD_SIZE
    )
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": BASE, "alpha": 1000.0}
    expected, scale = hunyuan.HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters(
        config
    )
    op = ops.DynamicNTKAlphaRotaryEmbedding(*PLAIN, 1000.0, torch.float32)
    assert_table(op.cos_sin_cache, expected, TRAINED, scale)


def test_fixed_and_mixed_ntk() -> None:
    """Fixed, the slowest pair turns ``scaling_factor`` times slower; mixed, the order sets how much each does."""
    fixed = ops.NTKScalingRotaryEmbedding(*PLAIN, 8.0, torch.float32)
    assert_table(fixed.cos_sin_cache, plain_frequencies(8 * BASE) / 8 ** (2 / HEAD_SIZE), TRAINED)
    slowest = plain_frequencies()[-1].item() / fixed._compute_inv_freq(BASE)[-1].item()
    assert slowest == pytest.approx(8.0, rel=1e-5)
    mixed = ops.NTKScalingRotaryEmbedding(*PLAIN, 8.0, torch.float32, 0.6)
    by = torch.tensor(
        [math.exp(math.log(8.0) / PAIRS**0.6 * m**0.6) for m in range(1, PAIRS + 1)],
        dtype=torch.float64,
    )
    assert_table(mixed.cos_sin_cache, plain_frequencies() / by, TRAINED)


@pytest.mark.parametrize("positions", [TRAINED, 8 * TRAINED])
def test_longrope(positions: int) -> None:
    """Both tables and the scale are those of transformers; more positions than trained take the long one."""
    sizes = (HEAD_SIZE, HEAD_SIZE, positions, TRAINED, BASE, True)
    op = ops.Phi3LongRoPEScaledRotaryEmbedding(*sizes, torch.float32, SHORT, LONG)
    rope = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": TRAINED}
    for rows, length in zip(
        op.long_short_cos_sin_cache.split([TRAINED, positions]), (1, 8 * TRAINED), strict=True
    ):
        frequencies, scale = of_transformers("longrope", length, factor=positions / TRAINED, **rope)
        assert_table(rows, frequencies, len(rows), scale)
    assert op.use_long_rope is (positions > TRAINED)
    where, query, key = (
        torch.randint(0, TRAINED, (7,)),
        torch.randn(7, 3, HEAD_SIZE),
        torch.randn(7, HEAD_SIZE),
    )
    for long in (False, True):
        op.use_long_rope = long
        plain = ops.RotaryEmbedding(*PLAIN, torch.float32)
        plain.cos_sin_cache = op.long_short_cos_sin_cache[TRAINED if long else 0 :]
        for got, wanted in zip(op(where, query, key), plain(where, query, key), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(
            op(where - 1, query, None, torch.ones(7, dtype=torch.int64))[0],
            op(where, query, key)[0],
        )


def test_longrope_scales_of_its_own() -> None:
    """A model may give the scale of each table."""
    sizes = (HEAD_SIZE, HEAD_SIZE, 2 * TRAINED, TRAINED, BASE, True)
    op = ops.Phi3LongRoPEScaledRotaryEmbedding(*sizes, torch.float32, SHORT, LONG, 1.5, 2.5)
    assert (op.long_short_cos_sin_cache[0, 0], op.long_short_cos_sin_cache[TRAINED, 0]) == (
        1.5,
        2.5,
    )


def vision(dtype: torch.dtype = torch.complex64) -> Any:
    """An op for images of 6 by 6 patches."""
    return ops.Llama4VisionRotaryEmbedding(HEAD_SIZE, HEAD_SIZE // 2, 36, BASE, False, dtype)


def llama4_table() -> Tensor:
    config = Llama4VisionConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, image_size=60, patch_size=10
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": BASE}
    table: Tensor = llama4.Llama4VisionRotaryEmbedding(config).freqs_ci
    return table


def test_llama4_vision() -> None:
    """The table and the rotation are those of transformers, for query and key of any number of heads."""
    torch.testing.assert_close(vision().cos_sin_cache, llama4_table())
    query, key = torch.randn(2, 37, 3, HEAD_SIZE), torch.randn(2, 37, 1, HEAD_SIZE)
    expected = llama4.vision_apply_rotary_emb(query, key, llama4_table())
    for got, wanted in zip(vision()(query, key), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    exact = vision(torch.complex128)(query.double(), key.double())
    torch.testing.assert_close(exact, tuple(x.double() for x in expected), rtol=0, atol=1e-5)
    assert vision()(query)[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_llama4_vision_keeps_its_sines_in_a_cast(dtype: torch.dtype) -> None:
    """Casting a model drops no imaginary part; the op computes in the dtype of its input."""
    cast, made = vision().to(dtype), vision(dtype)
    query = torch.randn(2, 37, 3, HEAD_SIZE).to(dtype)
    expected = llama4.vision_apply_rotary_emb(query.float(), query.float(), llama4_table())[0]
    for op in (cast, made, deepcopy(cast), pickle.loads(pickle.dumps(made))):  # noqa: S301  # ours
        assert op.cos_sin_cache.is_complex()
        torch.testing.assert_close(op(query)[0].float(), expected, rtol=0.02, atol=0.02)
    assert vision().to("meta").cos_sin_cache.is_meta


MODELS: list[tuple[dict[str, Any] | None, type, dict[str, Any]]] = [
    (None, ops.RotaryEmbedding, {"base": 10000.0, "rotary_dim": HEAD_SIZE}),
    ({"partial_rotary_factor": 0.5}, ops.RotaryEmbedding, {"rotary_dim": PAIRS}),
    ({"rope_dim": 16}, ops.RotaryEmbedding, {"rotary_dim": 16}),
    ({"mrope_section": [10, 8, 6]}, ops.MRotaryEmbedding, {"cache_max_position_num": 4096}),
    (
        {"rope_type": "linear", "factor": 2.0},
        ops.LinearScalingRotaryEmbedding,
        {"scaling_factors": [2.0]},
    ),
    (
        {"rope_type": "ntk", "factor": 2.0, "mixed_b": 0.5},
        ops.NTKScalingRotaryEmbedding,
        {"mixed_b": 0.5},
    ),
    (
        {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 256},
        ops.DynamicNTKScalingRotaryEmbedding,
        {"max_position_embeddings": 1024, "max_trained_positions": 256},
    ),
    (
        {"rope_type": "dynamic", "alpha": 9.0},
        ops.DynamicNTKAlphaRotaryEmbedding,
        {"scaling_alpha": 9.0},
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        ops.Llama3RotaryEmbedding,
        {"orig_max_position": TRAINED, "scaling_factor": 8.0},
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 2.0,
        },
        ops.YaRNScalingRotaryEmbedding,
        {"max_position_embeddings": 128, "mscale": 2.0},
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mrope_section": [10, 8, 6],
            "mrope_interleaved": True,
            "truncate": False,
        },
        ops.MRotaryEmbedding,
        {"mrope_interleaved": True, "scaling_factor": 4.0, "truncate": False},
    ),
    (
        {
            "rope_type": "deepseek_yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale_all_dim": 1.0,
        },
        ops.DeepseekScalingRotaryEmbedding,
        {"max_position_embeddings": 128, "mscale": 1.0},
    ),
    (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": TRAINED,
            "long_mscale": 1.5,
        },
        ops.Phi3LongRoPEScaledRotaryEmbedding,
        {"use_long_rope": True, "long_mscale": 1.5},
    ),
    (
        {"rope_type": "mllama4", "partial_rotary_factor": 0.5},
        ops.Llama4VisionRotaryEmbedding,
        {"max_position_embeddings": 1024},
    ),
]


@pytest.mark.parametrize(("parameters", "cls", "attributes"), MODELS)
def test_get_rope(parameters: dict[str, Any] | None, cls: type, attributes: dict[str, Any]) -> None:
    """The parameters of a model's config choose the class and what it is constructed with."""
    op = ops.get_rope(HEAD_SIZE, 1024, True, parameters, torch.float32)
    assert op.op_class is cls
    assert {name: getattr(op, name) for name in attributes} == attributes


def test_get_rope_for_attention_in_chunks() -> None:
    """A config for attention in chunks comes first; the table has torch's default dtype."""
    chunks = {"chunk_size": 24, "local_size": 7, "sparse_attention_config": {}}
    op = ops.get_rope(HEAD_SIZE, 1024, dual_chunk_attention_config=chunks)
    assert (op.op_class, op.chunk_size, op.dtype) == (
        ops.DualChunkRotaryEmbedding,
        24,
        torch.float32,
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "yran"}, "rope_type is 'yran': did you mean 'yarn'"),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "'llama3' needs the parameter 'low_freq_factor', got",
        ),
        (
            {
                "rope_type": "yarn",
                "mrope_section": [10, 8, 6],
                "original_max_position_embeddings": TRAINED,
            },
            "'yarn' needs the parameter 'factor', got",
        ),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0, expected more than 0"),
        ({"rope_type": "mllama4"}, "rotary_dim is 48, expected half of head_size=48"),
        ({"rope_type": "dynamic", "alpha": -1.0}, "what the base is stretched by is -1.0"),
        (
            {"rope_type": "dynamic", "alpha": 2.0, "rope_dim": 2},
            "rotary_dim is 2, expected at least 4",
        ),
        ({"rope_type": "linear", "factor": 0.0}, "scaling_factors is 0.0"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": LONG,
                "original_max_position_embeddings": 9,
            },
            "short_factor has 1 factors, expected 24",
        ),
    ],
)
def test_parameters_that_make_no_rope(parameters: dict[str, Any], message: str) -> None:
    """What is unknown, missing or out of range is named."""
    with pytest.raises(ValueError, match=message):
        ops.get_rope(HEAD_SIZE, 1024, True, parameters)


def test_shapes_that_vision_and_longrope_refuse() -> None:
    """An image is square, and LongRoPE has one style."""
    with pytest.raises(
        ValueError, match="max_position_embeddings is 35, expected the patches of a square image"
    ):
        ops.Llama4VisionRotaryEmbedding(HEAD_SIZE, PAIRS, 35, BASE, False, torch.complex64)
    with pytest.raises(ValueError, match="is_neox_style is False, expected True for LongRoPE"):
        ops.Phi3LongRoPEScaledRotaryEmbedding(
            HEAD_SIZE, HEAD_SIZE, TRAINED, TRAINED, BASE, False, torch.float32, SHORT, LONG
        )
