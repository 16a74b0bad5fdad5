"""Specs of the rotary embeddings, whose references turn pairs as complex numbers."""

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
QUERY_HEADS, KEY_HEADS = 3, 2


def _table(draw: Draw, rows: int, rotary_dim: int) -> Tensor:
    """Draw cosines and sines of random angles."""
    table = draw(rows, rotary_dim)
    angles = table[:, : rotary_dim // 2].double()
    return table.copy_(torch.cat((angles.cos(), angles.sin()), -1))


def _rotary_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw a flattened query and a key with its heads apart; of odd heads, and of those of 64, a part is rotated."""
    return {
        "positions": draw.integers(0, ROWS, lead),
        "query": draw(*lead, QUERY_HEADS * head_size),
        "key": draw(*lead, KEY_HEADS, head_size),
        "head_size": head_size,
        "cos_sin_cache": _table(draw, ROWS, 32 if head_size == 64 else head_size // 2 * 2),
    }


def _multimodal(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    arguments = _rotary_inputs(draw, lead, head_size)
    pairs = arguments["cos_sin_cache"].shape[1] // 2
    height, width = (pairs + 1) // 3, pairs // 4
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
    """Multiply pairs of the last dimension, as complex numbers, by those of a table."""
    halves = (x.shape[-1] // 2, 2) if not is_neox_style else (2, x.shape[-1] // 2)
    real, imaginary = x.reshape(*x.shape[:-1], *halves).unbind(-2 if is_neox_style else -1)
    product = torch.complex(real.contiguous(), imaginary.contiguous()) * torch.complex(cos, sin)
    return torch.stack((product.real, product.imag), -2 if is_neox_style else -1).reshape(x.shape)


def _embedded(x: Tensor, rows: Tensor, head_size: int, is_neox_style: bool) -> Tensor:
    """Rotate ``x`` by the row of a table for each of its tokens."""
    tokens, rotary_dim = rows.shape[:-1], rows.shape[-1]
    heads = x.reshape(*tokens, math.prod(x.shape[len(tokens) :]) // head_size, head_size)
    cos, sin = rows.reshape(*tokens, 1, 2, rotary_dim // 2).unbind(-2)
    rotated = turned(heads[..., :rotary_dim], cos, sin, is_neox_style)
    return torch.cat((rotated, heads[..., rotary_dim:]), -1).reshape(x.shape)


def _rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    rows = torch.stack(
        [cos_sin_cache[p] for p in positions.flatten()] or [cos_sin_cache[:0].sum(0)]
    )
    rows = rows[: positions.numel()].reshape(*positions.shape, cos_sin_cache.shape[1])
    return _embedded(query, rows, head_size, is_neox_style), _embedded(
        key, rows, head_size, is_neox_style
    )


def _axis(pair: int, section: Sequence[int], interleaved: bool) -> int:
    """Tell which of time, height and width turns a pair."""
    if interleaved:
        turn, axis = divmod(pair, 3)
        return axis if turn < section[axis] else 0
    return 0 if pair < section[0] else 1 if pair < section[0] + section[1] else 2


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
    columns = [
        cos_sin_cache[positions[axes[column % pairs]], column] for column in range(2 * pairs)
    ]
    rows = torch.stack(columns, -1)
    return _embedded(query, rows, head_size, is_neox_style), _embedded(
        key, rows, head_size, is_neox_style
    )


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
    places = [
        (p, min(p + length, chunk_size), farthest, p + length, p + chunk_size)
        for p in (position % length for position in positions.flatten().tolist())
    ]
    rows = cos_sin_cache[torch.tensor(places, dtype=torch.int64).reshape(*positions.shape, 5)]
    queries = [
        _embedded(query, rows[..., version, :], head_size, is_neox_style) for version in range(5)
    ]
    return torch.cat(queries, -1), _embedded(key, rows[..., 0, :], head_size, is_neox_style)


def _rotary_op(
    positions: Tensor, query: Tensor, key: Tensor, *geometry: Any, **others: Any
) -> Module:
    """Build the module; DeepSeek's variant, whose models pair even elements with odd ones, stands for that style."""
    return _build(ops.RotaryEmbedding, ops.DeepseekScalingRotaryEmbedding, *geometry, **others), (
        positions,
        query,
        key,
    )


def _build(
    plain: Callable[..., nn.Module],
    gptj: Callable[..., nn.Module],
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> nn.Module:
    rotary_dim, dtype = cos_sin_cache.shape[1], cos_sin_cache.dtype
    geometry = (head_size, rotary_dim, ROWS, 10000.0, is_neox_style)
    op = plain(*geometry, dtype) if is_neox_style else gptj(*geometry, 4.0, dtype)
    return with_parameters(op, cos_sin_cache=cos_sin_cache)


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
    """Rotate query and key by a family's function, which takes whole heads with their table repeated."""
    heads = [x.reshape(*cos.shape[:-1], -1, head_size) for x in (query, key)]
    rotary_dim = cos.shape[-1]
    turn = _modelling(family).apply_rotary_pos_emb
    rotated = turn(*(x[..., :rotary_dim] for x in heads), cos, sin, unsqueeze_dim=-2)
    whole = [
        torch.cat((part, x[..., rotary_dim:]), -1) for part, x in zip(rotated, heads, strict=True)
    ]
    return tuple(part.reshape(x.shape) for part, x in zip(whole, (query, key), strict=True))


def _llama(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> Any:
    cos, sin = (
        half.repeat(*(1,) * positions.dim(), 2) for half in cos_sin_cache[positions].chunk(2, -1)
    )
    return _by_transformers("llama", query, key, head_size, cos, sin) if is_neox_style else None


def _cohere(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> Any:
    cos, sin = (half.repeat_interleave(2, -1) for half in cos_sin_cache[positions].chunk(2, -1))
    return None if is_neox_style else _by_transformers("cohere", query, key, head_size, cos, sin)


def _given_to(repeated: Callable[[Tensor], Tensor], for_neox_style: bool) -> Callable[..., Any]:
    """Return the function of a family with that style, which takes its table ``repeated`` over whole heads."""

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
        halves = cos_sin_cache[positions].chunk(2, -1)
        cos, sin = (
            recompose(SimpleNamespace(mrope_section=mrope_section), half.clone()) for half in halves
        )
        return _by_transformers("llama", query, key, head_size, cos, sin)

    return call


def _rotary_flops(query: Tensor, key: Tensor, **others: Any) -> int:
    return 3 * (query.numel() + key.numel())


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
        **{**HEADS, "flops": lambda query, key, **others: 3 * (5 * query.numel() + key.numel())},
    ),
)
