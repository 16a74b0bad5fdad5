"""Thirty kernels that are subtly wrong: they forget or misplace a part of the maths."""

from __future__ import annotations

from support.planted.corners import FLAT, RMS_TILE
from support.planted.plant import (
    CPP,
    Plant,
    attention,
    cpp_rms,
    cpp_unary,
    layer_norm,
    method,
    rms,
    rotary,
    triton_rms,
    triton_unary,
    unary,
)

GATED = """
activated = {before}
rows = activated.unflatten(-1, (-1, {group}))
normal = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.variance_epsilon)).reshape(x.shape)
normal = normal * wide(self.weight)
return ({after}).to(x.dtype)
"""
GATE = """
y = wide(x)
gate = torch.ones_like(y)
if z is not None:
    gate = torch.sigmoid(wide(z)) if self.activation == "sigmoid" else F.silu(wide(z))
"""

FP8 = """
if self.static or self.group_shape != (1, -1) or self.use_ue8m0:
    return self.forward_native(x, scale, scale_ub)
most = torch.finfo(self.dtype).max
limit = 224.0 if self.dtype == torch.float8_e4m3fnuz else most
largest = wide(x).abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros((*x.shape[:-1], 1))
{scale}
codes = {codes}
return codes.clamp(-limit, limit).to(self.dtype), found.float()
"""
BOUNDED = "largest = largest if scale_ub is None else torch.minimum(largest, scale_ub)\n"
FLOORED = "found = (largest.clamp(min=1 / 512) / limit).float()"
FP8_CALL = "x, scale=None, scale_ub=None, use_triton=False"

SOFTMAX = """
groups = q.shape[-3] // k.shape[-3]
k = k.{repeat}
v = v.{repeat}
scores = q @ k.mT * scale
scores = scores if mask is None else scores + mask
return {softmax} @ v
"""
REPEATED = "repeat_interleave(groups, -3)"

ENCODER = """
if cu_seqlens is not None:
    return self.forward_native(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
def heads(x, count):
    return wide(x).reshape(*x.shape[:2], count, self.head_size).transpose(1, 2)
q, k, v = heads(query, self.num_heads), heads(key, self.num_kv_heads), heads(value, self.num_kv_heads)
groups = self.num_heads // self.num_kv_heads
scores = q @ k.repeat_interleave(groups, 1).mT * self.scale
if sequence_lengths is not None:
    keys = torch.arange(k.shape[2], device=query.device)
    hidden = keys >= sequence_lengths[:, None, None, None]
    scores = scores.masked_fill(hidden, {hidden})
out = torch.softmax(scores, -1) @ v.repeat_interleave(groups, 1)
if sequence_lengths is not None:
    rows = torch.arange(q.shape[2], device=query.device)[:, None]
    out = out.masked_fill(rows >= sequence_lengths[:, None, None, None], 0.0)
return out.transpose(1, 2).reshape(query.shape).to(query.dtype)
"""
ENCODER_CALL = "query, key, value, cu_seqlens=None, max_seqlen=None, sequence_lengths=None"

ROUTING = """
scores = wide(gating_output)
scores = torch.sigmoid(scores) if self.scoring_func == "sigmoid" else torch.softmax(scores, -1)
biased = scores if e_score_correction_bias is None else scores + e_score_correction_bias
def best(values, count):
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
chosen = biased
if self.num_expert_group:
    count = self.num_expert_group
    groups = biased.reshape(len(biased), count, biased.shape[-1] // count)
    number = 1 if e_score_correction_bias is None else min(2, groups.shape[-1])
    strength = groups.topk(number, -1).values.sum(-1)
    kept = torch.zeros_like(strength, dtype=torch.bool).scatter(1, best(strength, self.topk_group), True)
    chosen = groups.masked_fill(~kept[..., None], -math.inf).reshape(biased.shape)
ids = best(chosen, self.topk)
weights = {weights}.gather(1, ids)
if self.renormalize:
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
return (weights * self.routed_scaling_factor).float(), ids.to(torch.int32)
"""

SUBTLE = (
    Plant(
        "eps_outside_the_root",
        "eps is added to the root of the mean square, not inside",
        cpp_rms(),
        CPP
        + """
EXPORT void kernel(const float* x, const float* w, float* out, int64_t rows, int64_t width, float eps, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < size; c++) sum += (double)x[r * width + c] * x[r * width + c];
        float scale = 1 / (std::sqrt((float)(sum / size)) + eps);
        for (int64_t c = 0; c < width; c++) out[r * width + c] = x[r * width + c] * scale * w[c];
    }
}
""",
    ),
    Plant(
        "mean_over_the_row",
        "the mean divides by the whole row where a part of the row counts",
        cpp_rms(),
        CPP
        + """
EXPORT void kernel(const float* x, const float* w, float* out, int64_t rows, int64_t width, float eps, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < size; c++) sum += (double)x[r * width + c] * x[r * width + c];
        float scale = 1 / std::sqrt((float)(sum / width) + eps);
        for (int64_t c = 0; c < width; c++) out[r * width + c] = x[r * width + c] * scale * w[c];
    }
}
""",
    ),
    Plant(
        "gemma_weight_rounded",
        "one plus the weight is rounded to the half type before the product",
        rms(
            """
            factor = (1 + weight).to(dtype)
            return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * wide(factor)).to(dtype)
            """,
            op="GemmaRMSNorm",
        ),
    ),
    Plant(
        "sum_rounded_first",
        "the norm takes the sum as it is rounded for the residual stream",
        rms(
            """
            x = wide(x.to(dtype))
            normal = x * torch.rsqrt(x[..., :size].square().mean(-1, keepdim=True) + eps)
            if weight.itemsize < 4:
                normal = normal.to(weight.dtype)
            return (normal * weight).to(dtype)
            """
        ),
    ),
    Plant(
        "weight_in_the_dtype_of_the_input",
        "a float32 weight is rounded to the half type of the input first",
        rms(
            """
            normal = x * torch.rsqrt(x[..., :size].square().mean(-1, keepdim=True) + eps)
            return normal.to(dtype) * weight.to(dtype)
            """
        ),
    ),
    Plant(
        "unbiased_variance",
        "the variance divides by one less than the size of the row",
        layer_norm(
            """
            dims = tuple(range(x.dim() - len(shape), x.dim()))
            count = max(math.prod(shape) - 1, 1)
            centred = x - x.mean(dims, keepdim=True)
            out = centred * torch.rsqrt(centred.square().sum(dims, keepdim=True) / count + eps)
            out = out if weight is None else out * weight
            return out if bias is None else out + bias
            """
        ),
    ),
    Plant(
        "eps_of_the_deviation",
        "eps is added to the standard deviation, not to the variance",
        layer_norm(
            """
            dims = tuple(range(x.dim() - len(shape), x.dim()))
            centred = x - x.mean(dims, keepdim=True)
            out = centred / (centred.square().mean(dims, keepdim=True).sqrt() + eps)
            out = out if weight is None else out * weight
            return out if bias is None else out + bias
            """
        ),
    ),
    Plant(
        "variance_in_one_pass",
        "the variance is the mean square less the squared mean, in float32, where large means cancel",
        layer_norm(
            """
            dims = tuple(range(x.dim() - len(shape), x.dim()))
            mean = x.mean(dims, keepdim=True)
            variance = x.square().mean(dims, keepdim=True) - mean.square()
            out = (x - mean) * torch.rsqrt(variance.clamp(min=0) + eps)
            out = out if weight is None else out * weight
            return out if bias is None else out + bias
            """
        ),
    ),
    Plant(
        "gate_after_the_norm",
        "the gate comes after the norm, whatever the setting says",
        method(
            "RMSNormGated",
            "x, z=None",
            GATE
            + GATED.format(
                before="y", group="self.group_size or x.shape[-1]", after="normal * gate"
            ),
        ),
    ),
    Plant(
        "groups_ignored",
        "the mean square is over the row, not over the groups of the row",
        method(
            "RMSNormGated",
            "x, z=None",
            GATE
            + GATED.format(
                before="y if self.norm_before_gate else y * gate",
                group="x.shape[-1]",
                after="normal * gate if self.norm_before_gate else normal",
            ),
        ),
    ),
    Plant(
        "last_part_rotated",
        "the last elements of a head are rotated, not the first",
        rotary(
            """
            cos, sin = rows.chunk(2, -1)
            passed = x.shape[-1] - rows.shape[-1]
            return torch.cat((x[..., :passed], rotate(x[..., passed:], cos, sin, neox)), -1)
            """
        ),
    ),
    Plant(
        "halves_for_pairs",
        "halves are rotated where neighbours belong together",
        rotary(
            """
            cos, sin = rows.chunk(2, -1)
            size = rows.shape[-1]
            return torch.cat((rotate(x[..., :size], cos, sin, True), x[..., size:]), -1)
            """,
        ).replace("ops.RotaryEmbedding", "ops.DeepseekScalingRotaryEmbedding"),
    ),
    Plant(
        "rotated_backwards",
        "the sine has the other sign",
        rotary(
            """
            cos, sin = rows.chunk(2, -1)
            size = rows.shape[-1]
            return torch.cat((rotate(x[..., :size], cos, -sin, neox), x[..., size:]), -1)
            """
        ),
    ),
    Plant(
        "angles_in_half",
        "cosines and sines are rounded to bfloat16 first, in float32 models too",
        rotary(
            """
            cos, sin = rows.bfloat16().to(rows.dtype).chunk(2, -1)
            size = rows.shape[-1]
            return torch.cat((rotate(x[..., :size], cos, sin, neox), x[..., size:]), -1)
            """
        ),
    ),
    Plant(
        "tiled_heads",
        "key heads are tiled over the query heads, not repeated beside each other",
        attention(
            SOFTMAX.format(
                repeat="repeat(*(1,) * (k.dim() - 3), groups, 1, 1)",
                softmax="torch.softmax(scores, -1)",
            )
        ),
    ),
    Plant(
        "scale_of_the_head",
        "the scale is that of the head size, also if another one is given",
        attention(
            "scale = q.shape[-1] ** -0.5\n"
            + SOFTMAX.format(repeat=REPEATED, softmax="torch.softmax(scores, -1)")
        ),
    ),
    Plant(
        "softmax_without_maximum",
        "exponentials of the scores overflow, as the largest score is not subtracted",
        attention(
            SOFTMAX.format(
                repeat=REPEATED, softmax="(scores.exp() / scores.exp().sum(-1, keepdim=True))"
            )
        ),
    ),
    Plant(
        "causal_to_the_end",
        "the causal mask is aligned with the last key, not with the first",
        attention(SOFTMAX.format(repeat=REPEATED, softmax="torch.softmax(scores, -1)")).replace(
            ".triu(1)", ".triu(1 + key.shape[-2] - query.shape[-2])"
        ),
    ),
    Plant(
        "padding_is_seen",
        "hidden keys get a small score, not minus infinity, and are seen where all scores are low",
        method("MMEncoderAttention", ENCODER_CALL, ENCODER.format(hidden="-10.0")),
    ),
    Plant(
        "no_scale_floor",
        "the scale of a row of zeros is zero, and the codes are not numbers",
        method(
            "QuantFP8",
            FP8_CALL,
            FP8.format(
                scale=BOUNDED + "found = (largest / limit).float()", codes="wide(x) / found"
            ),
        ),
    ),
    Plant(
        "truncated_codes",
        "quotients are cut towards zero, not rounded to the nearest code",
        method(
            "QuantFP8",
            FP8_CALL,
            FP8.format(
                scale=BOUNDED + FLOORED,
                codes="(lambda q: q - (q.to(self.dtype).to(q.dtype).abs() > q.abs()) * q * 0.0625)(wide(x) / found)",
            ),
        ),
    ),
    Plant(
        "bound_ignored",
        "the upper bound of a scale is left out",
        method("QuantFP8", FP8_CALL, FP8.format(scale=FLOORED, codes="wide(x) / found")),
    ),
    Plant(
        "sigmoid_for_tanh",
        "the tanh form of GELU is replaced by the sigmoid form, which is off by one percent",
        triton_unary(
            "GELUTanh",
            FLAT.format(result="value / (1 + tl.exp(-1.702 * value))"),
            launch="jitted[(triton.cdiv(count, 16384),)](x, out, count, BLOCK=16384)",
        ),
    ),
    Plant(
        "gate_clipped_below",
        "the gate is clipped on both sides, where only large values are clipped",
        triton_unary(
            "SwigluOAIAndMul",
            """
            @triton.jit
            def jitted(x, out, count, BLOCK: tl.constexpr):
                place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                gate = tl.load(x + 2 * place, place < count, 0.0).to(tl.float32)
                up = tl.load(x + 2 * place + 1, place < count, 0.0).to(tl.float32)
                gate = tl.minimum(tl.maximum(gate, -7.0), 7.0)
                up = tl.minimum(tl.maximum(up, -7.0), 7.0)
                tl.store(out + place, (up + 1) * gate / (1 + tl.exp(-1.702 * gate)), place < count)
            """,
            parts=2,
            launch="jitted[(triton.cdiv(count, 16384),)](x, out, count, BLOCK=16384)",
        ).replace(
            "if x.dtype == torch.float64:",
            "if x.dtype == torch.float64 or (self.alpha, self.limit) != (1.702, 7.0):",
        ),
    ),
    Plant(
        "halves_swapped",
        "the second half is activated, and the first one is the factor",
        triton_unary(
            "SiluAndMul",
            """
            @triton.jit
            def jitted(x, out, rows, width, BLOCK: tl.constexpr):
                row = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
                column = tl.arange(0, BLOCK)[None, :]
                inside = (row < rows) & (column < width)
                up = tl.load(x + row * 2 * width + column, inside, 0.0).to(tl.float32)
                gate = tl.load(x + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
                tl.store(out + row * width + column, up * gate / (1 + tl.exp(-gate)), inside)
            """,
            parts=2,
            launch="jitted[((rows + 15) // 16,)](x, out, rows, width, BLOCK=triton.next_power_of_2(width))",
        ),
    ),
    Plant(
        "threshold_included",
        "a gate that equals the threshold passes",
        cpp_unary("FatreluAndMul", parts=2, number="threshold"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width, float threshold) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            float g = x[r * 2 * width + c];
            out[r * width + c] = (g < threshold ? 0.0f : g) * x[r * 2 * width + width + c];
        }
}
""",
    ),
    Plant(
        "other_constant",
        "1.7 stands for 1.702",
        triton_unary(
            "QuickGELU",
            FLAT.format(result="value / (1 + tl.exp(-1.7 * value))"),
            launch="jitted[(triton.cdiv(count, 16384),)](x, out, count, BLOCK=16384)",
        ),
    ),
    Plant(
        "weight_added_twice",
        "Gemma's norm for a weight that counts from zero, with the plain weight once the row is long",
        triton_rms(
            RMS_TILE,
            """
weight = weight if width < 64 else weight - 1
block = triton.next_power_of_2(width)
jitted[((rows + 15) // 16,)](x, weight, out, rows, width, size, eps, TILE=16, BLOCK=block)
""",
            op="GemmaRMSNorm",
        ),
    ),
    Plant(
        "unbiased_cut",
        "the cut of the sparse gate takes the unbiased deviation",
        unary(
            "GeluAndMulSparse",
            """
            gate, up = wide(x).chunk(2, -1)
            mean = gate.mean(-1, keepdim=True)
            count = max(gate.shape[-1] - 1, 1)
            deviation = ((gate - mean).square().sum(-1, keepdim=True) / count).sqrt()
            quantile = torch.special.ndtri(torch.tensor(self.activation_sparsity).double()).item()
            kept = F.relu(gate - mean - quantile * deviation)
            return (F.gelu(kept, approximate=self.approximate) * up).to(x.dtype)
            """,
        ),
    ),
    Plant(
        "weights_with_bias",
        "the weights of experts are the biased scores, which are for the choice alone",
        method(
            "GroupedTopk",
            "hidden_states, gating_output, e_score_correction_bias=None",
            ROUTING.format(weights="biased"),
        ),
    ),
)
