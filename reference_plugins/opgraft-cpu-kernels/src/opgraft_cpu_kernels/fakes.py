"""Fake rules of the ops. A rule returns tensors with the shapes and dtypes of the op's results.

torch calls the rules instead of the ops when it traces or compiles code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from opgraft import functional
from opgraft.kernels import TILE
from torch import Tensor

from opgraft_cpu_kernels.arguments import named, refusal


def _like(x: Tensor, *others: object, **settings: object) -> Tensor:
    return x.new_empty(x.shape)


def _like_query(query: Tensor, *others: object, **settings: object) -> Tensor:
    return query.new_empty(query.shape)


def _pair_like(x: Tensor, *others: object, **settings: object) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _mapped(x: Tensor, weight: Tensor, *others: object, **settings: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _mapped_by_heads(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def _mapped_by_codes(
    x: Tensor, weight: Tensor, scales: Tensor, *others: object, **settings: object
) -> Tensor:
    outputs = weight.shape[0]
    if weight.dim() == 3:  # in tiles
        outputs *= TILE
    return x.new_empty((*x.shape[:-1], outputs))


def _looked_up(
    weight: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    in_features: int,
    rows: Tensor,
) -> Tensor:
    return units.new_empty((*rows.shape, in_features), dtype=torch.bfloat16)


def _mapped_twice(
    x: Tensor, first: Tensor, first_bias: Tensor | None, second: Tensor, *others: object
) -> Tensor:
    return _mapped(x, second)


def _mapped_by_panels(
    x: Tensor, weight: Tensor, packed: Tensor, *others: object, **settings: object
) -> Tensor:
    return _mapped(x, weight)


def _half(x: Tensor, *others: object, **settings: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _nothing(*arguments: object, **settings: object) -> None:
    return None


def _query_and_key(
    positions: Tensor, query: Tensor, key: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    return _like(query), _like(key)


def _heads(query: Tensor, key: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return _with_heads_inside(query), _with_heads_inside(key)


def _with_heads_inside(x: Tensor) -> Tensor:
    """Return ``[batch, heads, tokens, size]`` in memory of ``[batch, tokens, heads, size]``."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _fp8(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn)


def _fp8_and_scale(x: Tensor, group_shape: Sequence[int], *others: object) -> tuple[Tensor, Tensor]:
    rows, columns = group_shape
    if rows == -1:  # one scale for the tensor
        return _fp8(x), x.new_empty((1,), dtype=torch.float32)
    groups = 1 if columns == -1 else -(-x.shape[-1] // columns)
    scales = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    return _fp8(x), scales


def _int8_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.int8)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return codes, scales


def _value_and_place(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.new_empty(x.shape[:1], dtype=torch.float32)
    places = x.new_empty(x.shape[:1], dtype=torch.int64)
    return values, places


def _attended(
    query: Tensor, key: Tensor, value: Tensor, *others: object, **settings: object
) -> Tensor:
    *batch, tokens, _ = query.shape
    width = value.shape[-1]
    if not batch:
        return query.new_empty((tokens, width))
    # In memory a token's heads lie side by side.
    *outer, heads = batch
    return query.new_empty((*outer, tokens, heads, width)).transpose(-3, -2)


def _attended_by_layer(
    query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None
) -> Tensor:
    if width is None:
        width = query.shape[-1]
    return query.new_empty((*query.shape[:-1], width))


def _latents(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], kv_lora_rank))


def _scanned(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bounds: Tensor,
    initial_states: Tensor,
    *others: object,
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(initial_states)


def _convolved(
    x: Tensor, weight: Tensor, bounds: Tensor, initial_states: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(initial_states)


QUANTIZED = (
    "rms_norm_quant_fp8_static",
    "rms_norm_quant_fp8_dynamic",
    "fused_add_rms_norm_quant_fp8_static",
    "fused_add_rms_norm_quant_fp8_dynamic",
    "silu_and_mul_quant_fp8_static",
    "silu_and_mul_quant_fp8_dynamic",
    "scaled_dot_product_attention_quant_fp8_static",
)
"""Ops with the rules of opgraft's forms of the same names. The ops have no ``dtype`` argument."""

RULES: dict[Callable[..., object], str] = {
    _like: "rms_norm gemma_rms_norm layer_norm rms_norm_gated gelu gelu_tanh gelu_new gelu_fast quick_gelu silu relu2 "
    "xielu apply_rotary_emb fused_experts quantized_experts",
    _pair_like: "fused_add_rms_norm fused_add_gemma_rms_norm add_layer_norm",
    _half: "silu_and_mul mul_and_silu gelu_and_mul gelu_and_mul_sparse fatrelu_and_mul silu_and_mul_with_clamp "
    "swiglustep_and_mul swigluoai_and_mul",
    _nothing: "causal_conv1d_update selective_state_update rms_norm_out fused_add_rms_norm_ fused_add_gemma_rms_norm_ "
    "silu_ rotary_embedding_ add_lora_",
    _query_and_key: "rotary_embedding mrope qk_norm_rope",
    _heads: "rotate_heads",
    functional.dual_chunk_rotary_embedding.fake: "dual_chunk_rotary_embedding",
    **{getattr(functional, name).fake: name for name in QUANTIZED},
    _fp8: "quant_fp8_static",
    _fp8_and_scale: "quant_fp8_dynamic",
    _mapped: "linear linear_of_rows linear_of_many_rows int8_dynamic_linear lossless_linear",
    _looked_up: "lossless_rows",
    _mapped_by_heads: "linear_by_heads",
    _mapped_by_codes: "quantized_linear",
    _mapped_twice: "gated_mlp",
    _mapped_by_panels: "packed_linear",
    _int8_and_scale: "quant_int8_dynamic",
    _value_and_place: "greatest",
    _like_query: "attend_pages",
    _attended_by_layer: "attend_layer",
    _latents: "mla_paged_attention",
    _attended: "scaled_dot_product_attention",
    _convolved: "causal_conv1d",
    _scanned: "selective_scan",
}
"""Rule → the names of its ops."""


def register() -> None:
    """Register the rule of each op with torch. Call this once, after the library is loaded."""
    for rule, names in RULES.items():
        for name in names.split():
            torch.library.register_fake(f"opgraft_cpu_kernels::{name}", _refusing(name, rule))


def _refusing(name: str, rule: Callable[..., object]) -> Callable[..., object]:
    """Return a rule that refuses wrong arguments with the error of the op.

    If one tensor is on the device ``meta``, torch calls the rule instead of the op.
    """
    schema = getattr(torch.ops.opgraft_cpu_kernels, name).default._schema
    parameters = [argument.name for argument in schema.arguments]

    @functools.wraps(rule)
    def checked(*args: object, **kwargs: object) -> object:
        refused = refusal(name, named(parameters, args, kwargs))
        if refused:
            raise ValueError(refused)
        return rule(*args, **kwargs)

    return checked
