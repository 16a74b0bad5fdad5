"""Specs of the rotary embeddings. The references turn pairs as complex numbers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from opgraft.ops import rotary as ops
from opgraft.ops.rotary import functional
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside, of_transformers, with_parameters
from torch import Tensor, nn

Module = tuple[nn.Module, tuple[Any, ...]]

ROWS = 32
QUERY_HEADS = 3
KEY_HEADS = 2


def _table(draw: Draw, rows: int, rotary_dim: int) -> Tensor:
    """Draw cosines and sines of random angles."""
    table = draw(rows, rotary_dim)
    angles = table[:, : rotary_dim // 2].double()
    return table.copy_(torch.cat((angles.cos(), angles.sin()), -1))


def _rotary_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw a flattened query and a key with heads apart.

    A part of each head is rotated if the size is odd or 64, else the whole head.
    """
    rotary_dim = 32 if head_size == 64 else head_size // 2 * 2
    return {
        "positions": draw.integers(0, ROWS, lead),
        "query": draw(*lead, QUERY_HEADS * head_size),
        "key": draw(*lead, KEY_HEADS, head_size),
        "head_size": head_size,
        "cos_sin_cache": _table(draw, ROWS, rotary_dim),
    }


def _multimodal(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    arguments = _rotary_inputs(draw, lead, head_size)
    pairs = arguments["cos_sin_cache"].shape[1] // 2
    # The most pairs that height may have when sections take turns, and fewer for width.
    height = (pairs + 1) // 3
    width = pairs // 4

    positions = draw.integers(0, ROWS, (3, *lead))
    return {
        **arguments,
        "positions": positions,
        "mrope_section": [pairs - height - width, height, width],
    }


def _chunked(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    positions = draw.integers(0, 100, lead)
    return {
        **_rotary_inputs(draw, lead, head_size),
        "positions": positions,
        "chunk_size": 8,
        "local_size": 3,
    }


def _given(draw: Draw, lead: Sequence[int], pairs: int) -> Arguments:
    return {
        "x": draw(*lead, QUERY_HEADS, 2 * pairs),
        "cos": draw(lead[-1], pairs),
        "sin": draw(lead[-1], pairs),
    }


def turned(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """Multiply pairs of the last dimension, as complex numbers, by the numbers of a table."""
    *lead, size = x.shape
    if is_neox_style:
        halves = x.reshape(*lead, 2, size // 2)
        dim = -2
    else:
        halves = x.reshape(*lead, size // 2, 2)
        dim = -1

    real, imaginary = halves.unbind(dim)
    numbers = torch.complex(real.contiguous(), imaginary.contiguous())
    product = numbers * torch.complex(cos, sin)
    return torch.stack((product.real, product.imag), dim).reshape(x.shape)


def _embedded(x: Tensor, rows: Tensor, head_size: int, is_neox_style: bool) -> Tensor:
    """Rotate ``x`` by one row of a table for each token."""
    *tokens, rotary_dim = rows.shape
    width = math.prod(x.shape[len(tokens) :])

    heads = x.reshape(*tokens, width // head_size, head_size)
    cos, sin = rows.reshape(*tokens, 1, 2, rotary_dim // 2).unbind(-2)

    rotated = turned(heads[..., :rotary_dim], cos, sin, is_neox_style)
    passed = heads[..., rotary_dim:]
    return torch.cat((rotated, passed), -1).reshape(x.shape)


def _rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    rotary_dim = cos_sin_cache.shape[1]
    rows = cos_sin_cache.new_empty(positions.numel(), rotary_dim)
    for token, position in enumerate(positions.flatten().tolist()):
        rows[token] = cos_sin_cache[position]

    rows = rows.reshape(*positions.shape, rotary_dim)
    rotated_query = _embedded(query, rows, head_size, is_neox_style)
    rotated_key = _embedded(key, rows, head_size, is_neox_style)
    return rotated_query, rotated_key


def _axis(pair: int, section: Sequence[int], interleaved: bool) -> int:
    """Return the axis that turns a pair: 0 time, 1 height, 2 width."""
    if interleaved:
        turn, axis = divmod(pair, 3)
        return axis if turn < section[axis] else 0

    time, height, _ = section
    if pair < time:
        return 0
    return 1 if pair < time + height else 2


def _mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    mrope_section: Sequence[int],
    is_neox_style: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    pairs = cos_sin_cache.shape[1] // 2
    axes = [_axis(pair, mrope_section, interleaved) for pair in range(pairs)]
    columns = []
    for column in range(2 * pairs):
        axis = axes[column % pairs]
        columns.append(cos_sin_cache[positions[axis], column])

    rows = torch.stack(columns, -1)
    rotated_query = _embedded(query, rows, head_size, is_neox_style)
    rotated_key = _embedded(key, rows, head_size, is_neox_style)
    return rotated_query, rotated_key


def _dual_chunk(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    chunk_size: int,
    local_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    length = chunk_size - local_size
    farthest = min(2 * length - 1, chunk_size)
    places = []
    for position in positions.flatten().tolist():
        place = position % length
        before = place + length
        places.append((place, min(before, chunk_size), farthest, before, place + chunk_size))

    rows = cos_sin_cache[torch.tensor(places, dtype=torch.int64).reshape(*positions.shape, 5)]
    queries = []
    for version in range(5):
        queries.append(_embedded(query, rows[..., version, :], head_size, is_neox_style))

    # The key is rotated by the place that the first query has, too.
    rotated_key = _embedded(key, rows[..., 0, :], head_size, is_neox_style)
    return torch.cat(queries, -1), rotated_key


def _rotary_op(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> Module:
    """Construct the module for a style: DeepSeek's variant for pairs of even and odd elements."""
    dtype = cos_sin_cache.dtype
    geometry = (head_size, cos_sin_cache.shape[1], ROWS, 10000.0, is_neox_style)
    op: nn.Module
    if is_neox_style:
        op = ops.RotaryEmbedding(*geometry, dtype)
    else:
        op = ops.DeepseekScalingRotaryEmbedding(*geometry, 4.0, dtype)
    return with_parameters(op, cos_sin_cache=cos_sin_cache), (positions, query, key)


def _mrope_op(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    mrope_section: list[int],
    is_neox_style: bool = True,
    interleaved: bool = False,
) -> Module:
    geometry = (
        head_size,
        cos_sin_cache.shape[1],
        ROWS,
        10000.0,
        is_neox_style,
        cos_sin_cache.dtype,
    )
    op = ops.MRotaryEmbedding(*geometry, mrope_section, interleaved)
    return with_parameters(op, cos_sin_cache=cos_sin_cache), (positions, query, key)


def _dual_chunk_op(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    chunk_size: int,
    local_size: int,
    is_neox_style: bool = True,
) -> Module:
    geometry = (head_size, cos_sin_cache.shape[1], 100, 10000.0, is_neox_style, cos_sin_cache.dtype)
    op = ops.DualChunkRotaryEmbedding(*geometry, chunk_size, local_size)
    return with_parameters(op, cos_sin_cache=cos_sin_cache), (positions, query, key)


def _modelling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _by_transformers(
    family: str, query: Tensor, key: Tensor, head_size: int, cos: Tensor, sin: Tensor
) -> Any:
    """Rotate query and key by the function of a family.

    The function takes whole heads, and tables with a number for each element.
    """
    *tokens, rotary_dim = cos.shape
    q = query.reshape(*tokens, -1, head_size)
    k = key.reshape(*tokens, -1, head_size)

    turn = _modelling(family).apply_rotary_pos_emb
    rotated_q, rotated_k = turn(
        q[..., :rotary_dim], k[..., :rotary_dim], cos, sin, unsqueeze_dim=-2
    )

    whole_q = torch.cat((rotated_q, q[..., rotary_dim:]), -1)
    whole_k = torch.cat((rotated_k, k[..., rotary_dim:]), -1)
    return whole_q.reshape(query.shape), whole_k.reshape(key.shape)


def _llama(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> Any:
    if not is_neox_style:
        return None
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    cos = torch.cat((cos, cos), -1)
    sin = torch.cat((sin, sin), -1)
    return _by_transformers("llama", query, key, head_size, cos, sin)


def _cohere(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> Any:
    if is_neox_style:
        return None
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    cos = cos.repeat_interleave(2, -1)
    sin = sin.repeat_interleave(2, -1)
    return _by_transformers("cohere", query, key, head_size, cos, sin)


def _given_to(repeated: Callable[[Tensor], Tensor], for_neox_style: bool) -> Callable[..., Any]:
    """Return a call of a family's function for one style; ``repeated`` fills a table for heads."""

    def call(turn: Any, x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True) -> Any:
        if is_neox_style is not for_neox_style:
            return None
        return turn(x, x, repeated(cos), repeated(sin), unsqueeze_dim=-2)[0]

    return call


def _qwen(family: str, cls: str, takes_turns: bool) -> Callable[..., Any]:
    def call(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        mrope_section: list[int],
        is_neox_style: bool = True,
        interleaved: bool = False,
    ) -> Any:
        if interleaved is not takes_turns or not is_neox_style:
            return None

        recompose = getattr(_modelling(family), cls).recomposition_frequencies
        rope = SimpleNamespace(mrope_section=mrope_section)
        cos, sin = cos_sin_cache[positions].chunk(2, -1)

        # The function of the newer family writes to its argument.
        cos = recompose(rope, cos.clone())
        sin = recompose(rope, sin.clone())
        return _by_transformers("llama", query, key, head_size, cos, sin)

    return call


def _rotary_flops(query: Tensor, key: Tensor, **others: Any) -> int:
    return 3 * (query.numel() + key.numel())


def _dual_chunk_flops(query: Tensor, key: Tensor, **others: Any) -> int:
    return 3 * (5 * query.numel() + key.numel())


STYLES: dict[str, Arguments] = {"": {}, "gptj": {"is_neox_style": False}}
HEADS: dict[str, Any] = {
    "flops": _rotary_flops,
    "sizes": (3, 9, 6, 64),
    "large": (((5, 11), 80), ((5, 11), 120), ((307,), 256)),
}

SPECS = (
    OpSpec(
        functional.apply_rotary_emb,
        _given,
        lambda x, cos, sin, is_neox_style=True: turned(
            x, cos[:, None], sin[:, None], is_neox_style
        ),
        lambda x, **others: 3 * x.numel(),
        module=lambda x, cos, sin, **style: (ops.ApplyRotaryEmb(**style), (x, cos, sin)),
        variants=STYLES,
        outside=(
            of_transformers(
                "models.llama.modeling_llama.apply_rotary_pos_emb",
                _given_to(lambda t: t.repeat(1, 2), True),
            ),
            of_transformers(
                "models.cohere.modeling_cohere.apply_rotary_pos_emb",
                _given_to(lambda t: t.repeat_interleave(2, -1), False),
            ),
        ),
        sizes=(1, 9, 40),
        large=(((5, 11), 60), ((307,), 128)),
    ),
    OpSpec(
        functional.rotary_embedding,
        _rotary_inputs,
        _rotary,
        module=_rotary_op,
        variants=STYLES,
        outside=(
            Outside("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", _llama),
            Outside("transformers.models.cohere.modeling_cohere.apply_rotary_pos_emb", _cohere),
        ),
        **HEADS,
    ),
    OpSpec(functional.rotary_embedding_, _rotary_inputs, _rotary, variants=STYLES, **HEADS),
    OpSpec(
        functional.mrope,
        _multimodal,
        _mrope,
        module=_mrope_op,
        variants={**STYLES, "interleaved": {"interleaved": True}},
        outside=(
            Outside(
                "transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLRotaryEmbedding",
                _qwen("qwen2_vl", "Qwen2VLRotaryEmbedding", False),
            ),
            Outside(
                "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding",
                _qwen("qwen3_vl", "Qwen3VLTextRotaryEmbedding", True),
            ),
        ),
        **HEADS,
    ),
    OpSpec(
        functional.dual_chunk_rotary_embedding,
        _chunked,
        _dual_chunk,
        module=_dual_chunk_op,
        variants={**STYLES, "chunks apart": {"local_size": 0}},
        **{**HEADS, "flops": _dual_chunk_flops},
    ),
)
