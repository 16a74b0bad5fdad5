"""Frequencies, tables and positions of the variants of rotary embedding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opgraft import ops
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEAD_SIZE, TRAINED, BASE = 48, 512, 50000.0


def variant(
    cls: Any, *more: Any, dtype: torch.dtype = torch.float32, neox: bool = True, **options: Any
) -> Any:
    """A variant with whole heads rotated; the scaling factor comes before the dtype in the classes with YaRN."""
    scaled = cls in (ops.YaRNScalingRotaryEmbedding, ops.DeepseekScalingRotaryEmbedding)
    order = (*more, dtype) if scaled else (dtype, *more)
    return cls(HEAD_SIZE, HEAD_SIZE, TRAINED, BASE, neox, *order, **options)


def outside(kind: str, **rope: Any) -> tuple[Tensor, float]:
    """Frequencies and scale of transformers, for a model that was trained for ``TRAINED`` positions."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, max_position_embeddings=8 * TRAINED
    )
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": BASE,
        "original_max_position_embeddings": TRAINED,
        **rope,
    }
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(scale)


def table(frequencies: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """Cosines and sines in float64."""
    angles = torch.arange(rows).double()[:, None] * frequencies.double()
    return torch.cat((angles.cos(), angles.sin()), -1) * scale


def assert_table(op: Any, frequencies: Tensor, rows: int, scale: float = 1.0) -> None:
    """The op has these frequencies and this table, up to float32's rounding of angles."""
    of_factor = isinstance(
        op,
        (ops.YaRNScalingRotaryEmbedding, ops.DeepseekScalingRotaryEmbedding, ops.MRotaryEmbedding),
    )
    given = op.scaling_factor if of_factor else op.base
    torch.testing.assert_close(op._compute_inv_freq(given), frequencies, rtol=2e-6, atol=0)
    assert op.cos_sin_cache.shape == (rows, HEAD_SIZE)
    torch.testing.assert_close(
        op.cos_sin_cache.double(), table(frequencies, rows, scale), rtol=0, atol=rows * 1e-6
    )


LLAMA3: dict[str, float] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changed", [{}, {"factor": 32.0}, {"low_freq_factor": 2.5, "high_freq_factor": 2.75}]
)
def test_llama3(changed: dict[str, float]) -> None:
    """Frequencies are those of transformers for Llama 3.1, and the high ones bit for bit the plain ones."""
    settings = LLAMA3 | changed
    op = variant(ops.Llama3RotaryEmbedding, *settings.values(), TRAINED)
    assert_table(op, outside("llama3", **settings)[0], TRAINED)
    plain = variant(ops.RotaryEmbedding)._compute_inv_freq(BASE)
    turns = TRAINED * plain / (2 * math.pi)
    kept = turns > settings["high_freq_factor"]
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(op._compute_inv_freq(BASE)[kept], plain[kept])


YARN: list[dict[str, Any]] = [
    {},
    {"beta_fast": 8, "beta_slow": 2},
    {"truncate": False},
    {"beta_fast": 1},
]


@pytest.mark.parametrize("factor", [1.0, 4.0, 2.5])
@pytest.mark.parametrize("settings", YARN)
def test_yarn(factor: float, settings: dict[str, Any]) -> None:
    """Frequencies and scale are those of transformers, over as many positions as the factor makes of the trained."""
    frequencies, scale = outside("yarn", factor=factor, **settings)
    op = variant(ops.YaRNScalingRotaryEmbedding, factor, **settings)
    assert op.mscale == scale
    assert_table(op, frequencies, math.ceil(factor * TRAINED), scale)


def test_yarn_scales() -> None:
    """YaRN's own scale can be left out, an attention factor multiplies it, and extrapolation can be turned down."""
    own = 0.1 * math.log(4.0) + 1.0
    assert variant(ops.YaRNScalingRotaryEmbedding, 4.0).mscale == own
    assert variant(ops.YaRNScalingRotaryEmbedding, 4.0, attn_factor=2.0).mscale == 2.0 * own
    assert (
        variant(
            ops.YaRNScalingRotaryEmbedding, 4.0, attn_factor=2.0, apply_yarn_scaling=False
        ).mscale
        == 2.0
    )
    slow = variant(ops.YaRNScalingRotaryEmbedding, 4.0, extrapolation_factor=0.0)
    plain = variant(ops.RotaryEmbedding)
    torch.testing.assert_close(slow._compute_inv_freq(4.0), plain._compute_inv_freq(BASE) / 4.0)
    for own in ({"attention_factor": 1.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}):
        for cls, arguments in ((ops.YaRNScalingRotaryEmbedding, [4.0]), (ops.MRotaryEmbedding, [])):
            options = {} if arguments else {"scaling_factor": 4.0}
            op = variant(cls, *arguments, **options, **own)
            assert op.mscale == pytest.approx(outside("yarn", factor=4.0, **own)[1], rel=1e-12)


@pytest.mark.parametrize("scales", [(0.707, 0.707), (1.0, 0.5)])
def test_deepseek(scales: tuple[float, float]) -> None:
    """Frequencies and the quotient of the two scales are those of transformers."""
    mscale, mscale_all_dim = scales
    frequencies, scale = outside("yarn", factor=4.0, mscale=mscale, mscale_all_dim=mscale_all_dim)
    op = variant(
        ops.DeepseekScalingRotaryEmbedding,
        4.0,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        neox=False,
    )
    assert op.mscale == pytest.approx(scale, rel=1e-12)
    assert_table(op, frequencies, 4 * TRAINED, scale)
    assert (
        variant(ops.DeepseekScalingRotaryEmbedding, 4.0, attn_factor=3.0, mscale_all_dim=1).mscale
        == 3.0
    )


@pytest.mark.parametrize("factor", [None, 4.0])
def test_multimodal_table(factor: float | None) -> None:
    """The table is four times as long; its frequencies are YaRN's for the trained length, or plain."""
    op = variant(ops.MRotaryEmbedding, [8, 8, 8], scaling_factor=factor)
    assert (op.max_position_embeddings, op.cache_max_position_num) == (TRAINED, 4 * TRAINED)
    if factor is None:
        plain = variant(ops.RotaryEmbedding)
        assert torch.equal(op._compute_inv_freq(BASE), plain._compute_inv_freq(BASE))
        assert torch.equal(op.cos_sin_cache[:TRAINED], plain.cos_sin_cache)
        assert op.cos_sin_cache.shape[0] == 4 * TRAINED
    else:
        frequencies, scale = outside("yarn", factor=factor)
        assert_table(op, frequencies, 16 * TRAINED, scale)
        short = variant(ops.MRotaryEmbedding, [8, 8, 8], scaling_factor=factor, positions_factor=1)
        assert torch.equal(short.cos_sin_cache, op.cos_sin_cache[: 4 * TRAINED])


def test_interleaved_cosines() -> None:
    """apply_interleaved_rope puts the cosines of three axes together as the op does."""
    section = [10, 8, 6]
    op = variant(ops.MRotaryEmbedding, section, True)
    positions, query = torch.randint(0, TRAINED, (3, 7)), torch.randn(7, 2, HEAD_SIZE)
    cos, sin = (
        ops.apply_interleaved_rope(half, section)
        for half in op.cos_sin_cache[positions].chunk(2, -1)
    )
    assert cos.shape == (7, HEAD_SIZE // 2)
    torch.testing.assert_close(op.apply_rotary_emb(query, cos, sin), op(positions, query)[0])


def test_a_constructor_that_skips_the_variants_own() -> None:
    """``super(DeepseekScalingRotaryEmbedding, self).__init__`` works with the attributes that vLLM's op reads."""

    class Acme(ops.DeepseekScalingRotaryEmbedding):
        def __init__(self, *arguments: Any) -> None:
            self.scaling_factor, self.beta_fast, self.beta_slow, self.mscale = 4.0, 32, 1, 1.25
            super(ops.DeepseekScalingRotaryEmbedding, self).__init__(*arguments)

    frequencies, _ = outside("yarn", factor=4.0)
    assert_table(
        Acme(HEAD_SIZE, HEAD_SIZE, TRAINED, BASE, True, torch.float32),
        frequencies,
        4 * TRAINED,
        1.25,
    )


@pytest.mark.parametrize("section", [[12, 6, 6], [9, 8, 7]])
@pytest.mark.parametrize("interleaved", [False, True])
def test_text_among_images(section: list[int], interleaved: bool) -> None:
    """Text, whose three positions are one, is rotated as by the plain op, given as one row or as three."""
    op = variant(ops.MRotaryEmbedding, section, interleaved)
    positions, query, key = (
        torch.randint(0, TRAINED, (7,)),
        torch.randn(7, 3, HEAD_SIZE),
        torch.randn(7, HEAD_SIZE),
    )
    expected = variant(ops.RotaryEmbedding)(positions, query, key)
    for given in (positions, positions.expand(3, 7)):
        for got, wanted in zip(op(given, query, key), expected, strict=True):
            assert torch.equal(got, wanted)


def test_without_sections() -> None:
    """Without sections the multimodal op takes positions as the plain op does, a batch of them too."""
    op = variant(ops.MRotaryEmbedding)
    positions, query = torch.randint(0, TRAINED, (3, 7)), torch.randn(3, 7, HEAD_SIZE)
    assert torch.equal(op(positions, query)[0], variant(ops.RotaryEmbedding)(positions, query)[0])


VARIANTS: dict[str, Any] = {
    "llama3": lambda dtype: variant(
        ops.Llama3RotaryEmbedding, *LLAMA3.values(), TRAINED, dtype=dtype
    ),
    "yarn": lambda dtype: variant(ops.YaRNScalingRotaryEmbedding, 4.0, dtype=dtype),
    "deepseek": lambda dtype: variant(ops.DeepseekScalingRotaryEmbedding, 4.0, dtype=dtype),
    "multimodal": lambda dtype: variant(ops.MRotaryEmbedding, [10, 8, 6], dtype=dtype),
    "dual chunk": lambda dtype: variant(ops.DualChunkRotaryEmbedding, 24, 7, dtype=dtype),
}
variants = pytest.mark.parametrize("build", VARIANTS.values(), ids=VARIANTS)


@variants
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_table_is_a_buffer(build: Any, dtype: torch.dtype) -> None:
    """The table has the dtype asked for, moves with the module, to ``meta`` too, and is not saved with it."""
    op = build(dtype)
    assert op.cos_sin_cache.dtype == dtype
    assert not op.state_dict()
    assert op.to("meta").cos_sin_cache.is_meta
    with torch.device("meta"):
        assert build(dtype).cos_sin_cache.is_meta


@pytest.mark.parametrize("name", ["llama3", "yarn", "deepseek", "multimodal"])
def test_no_key(name: str) -> None:
    """Without a key the query is rotated as it is with one, and the second result is ``None``."""
    op = VARIANTS[name](torch.float32)
    query = torch.randn(7, 3 * HEAD_SIZE)
    rows = [torch.randint(0, TRAINED, (7,))] + [torch.randint(0, TRAINED, (3, 7))] * (
        name == "multimodal"
    )
    for positions in rows:
        rotated, key = op(positions, query)
        assert key is None
        assert torch.equal(rotated, op(positions, query, query)[1])


@pytest.mark.parametrize("name", ["deepseek", "multimodal", "dual chunk"])
def test_offsets(name: str) -> None:
    """Offsets are added to the positions, for every version of the query."""
    op = VARIANTS[name](torch.float32)
    positions, offsets = torch.randint(0, 99, (7,)), torch.randint(0, 99, (7,))
    query, key = torch.randn(7, HEAD_SIZE), torch.randn(7, HEAD_SIZE)
    for got, wanted in zip(
        op(positions, query, key, offsets), op(positions + offsets, query, key), strict=True
    ):
        assert torch.equal(got, wanted)


def test_chunks_keep_distances() -> None:
    """Within a chunk scores are those of the plain op; from the chunk before, the distance grows to its bound."""
    chunk, local = 24, 7
    length = chunk - local
    op = variant(ops.DualChunkRotaryEmbedding, chunk, local, dtype=torch.float64)
    plain = variant(ops.RotaryEmbedding, dtype=torch.float64)
    positions = torch.arange(5 * length)
    x = torch.randn(1, HEAD_SIZE, dtype=torch.float64).expand(len(positions), -1)
    queries, key = op(positions, x, x)
    own, before, further, *_ = (version @ key.T for version in queries.chunk(5, -1))
    rotated, _ = plain(positions, x)
    scores = rotated @ rotated[0]  # by distance
    distances = positions[:, None] - positions
    chunks = positions[:, None] // length - positions // length
    at = lambda distance: scores[distance.clamp(min=0)]  # noqa: E731
    place, key_place = (positions % length)[:, None], positions % length
    torch.testing.assert_close(
        own[(chunks == 0) & (distances >= 0)], at(distances)[(chunks == 0) & (distances >= 0)]
    )
    bounded = at((place + length).clamp(max=chunk) - key_place)
    torch.testing.assert_close(before[chunks == 1], bounded[chunks == 1])
    near = (chunks == 1) & (distances <= local)
    torch.testing.assert_close(before[near], at(distances)[near])
    farthest = at((min(2 * length - 1, chunk) - key_place).expand_as(distances))
    torch.testing.assert_close(further[chunks > 1], farthest[chunks > 1])


def test_attributes() -> None:
    """Kernels of plugins read the settings from the op."""
    llama3 = VARIANTS["llama3"](torch.float32)
    assert (llama3.scaling_factor, llama3.low_freq_factor, llama3.high_freq_factor) == (
        8.0,
        1.0,
        4.0,
    )
    assert llama3.orig_max_position == TRAINED
    for name in ("yarn", "deepseek"):
        op = VARIANTS[name](torch.float32)
        assert (op.scaling_factor, op.beta_fast, op.beta_slow, op.attn_factor) == (4.0, 32, 1, 1)
        assert (op.extrapolation_factor, op.truncate) == (1, True)
    multimodal = VARIANTS["multimodal"](torch.float32)
    assert (multimodal.mrope_section, multimodal.mrope_interleaved, multimodal.mscale) == (
        [10, 8, 6],
        False,
        1.0,
    )
    chunked = VARIANTS["dual chunk"](torch.float32)
    assert (chunked.chunk_size, chunked.local_size, chunked.cos_sin_cache.shape[0]) == (24, 7, 41)
    assert (chunked.head_size, chunked.rotary_dim, chunked.is_neox_style) == (
        HEAD_SIZE,
        HEAD_SIZE,
        True,
    )
    assert "chunk_size=24" in repr(chunked)


@variants
def test_compilation(build: Any) -> None:
    """A module of every variant compiles whole, once for all numbers of tokens, without looking at values."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    op = build(torch.float32)
    compiled = torch.compile(op, backend=backend, fullgraph=True, dynamic=True)
    lead = (3,) if isinstance(op, ops.MRotaryEmbedding) else ()
    for tokens in (5, 7, 11):
        positions = torch.randint(0, 99, (*lead, tokens))
        query, key = torch.randn(tokens, 2, HEAD_SIZE), torch.randn(tokens, HEAD_SIZE)
        torch.testing.assert_close(compiled(positions, query, key), op(positions, query, key))
    assert len(graphs) == 1
