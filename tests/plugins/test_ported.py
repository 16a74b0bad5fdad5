"""Plugins of the shapes that vLLM's device plugins have, ported by changing their imports alone.

Each is a distribution of its own. Its kernels compute with plain torch what a device would, so that results can be
compared with the native definitions.
"""

from __future__ import annotations

from typing import Any

import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, load_plugins, ops, set_config
from opgraft.plugins import outcomes
from opgraft.registry.state import host_state

PLUGIN = """
import torch
import opgraft
from opgraft import CustomOp, direct_register_custom_op
from opgraft.logger import init_logger

logger = init_logger(__name__)
platforms = "any"

{classes}

@opgraft.hookimpl
def opgraft_register_ops(platform):
{registration}
"""

TABLE = """
    for name, op_cls in REGISTERED_OPS.items():
        CustomOp.register_oot(_decorated_op_cls=op_cls, name=name)
"""

ROTARY = """
from opgraft.ops import ApplyRotaryEmb, DeepseekScalingRotaryEmbedding, MRotaryEmbedding, RotaryEmbedding
from opgraft.ops import apply_interleaved_rope


def rotated(positions, query, key, table, head_size, neox):
    tokens = positions.numel()
    cos, sin = table.index_select(0, positions.flatten()).chunk(2, dim=-1)
    results = []
    for x in (query, key):
        heads = x.reshape(tokens, -1, head_size)
        turning, passing = heads[..., : table.shape[1]], heads[..., table.shape[1] :]
        turning = ApplyRotaryEmb.forward_static(turning, cos, sin, neox)
        results.append(torch.cat((turning, passing), dim=-1).reshape(x.shape))
    return tuple(results)


class AcmeRotary(RotaryEmbedding):
    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache=True):
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache)
        logger.info_once("tables of %d rows", max_position_embeddings)

    def forward_oot(self, positions, query, key, offsets=None, is_neox_style_override=None):
        table = self._match_cos_sin_cache_dtype(query)
        return rotated(positions, query, key, table, self.head_size, self.is_neox_style)


class AcmeDeepseek(DeepseekScalingRotaryEmbedding):
    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, scaling_factor, dtype, *,
                 extrapolation_factor=1, attn_factor=1, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=0):
        self.scaling_factor, self.beta_fast, self.beta_slow, self.mscale = scaling_factor, beta_fast, beta_slow, 1.5
        super(DeepseekScalingRotaryEmbedding, self).__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def forward(self, positions, query, key, offsets=None):
        return rotated(positions, query, key, self.cos_sin_cache, self.head_size, self.is_neox_style)


class AcmeMRotary(MRotaryEmbedding):
    def forward_triton(self, positions, query, key):
        self._match_cos_sin_cache_dtype(query)
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        cos, sin = apply_interleaved_rope(cos, self.mrope_section), apply_interleaved_rope(sin, self.mrope_section)
        heads = [x.view(positions.shape[-1], -1, self.head_size) for x in (query, key)]
        return tuple(self.apply_rotary_emb(x, cos, sin).reshape(query.shape) for x in heads)

    def forward_oot(self, positions, query, key):
        if positions.ndim == 2 and self.mrope_interleaved:
            return self.forward_triton(positions, query, key)
        return super().forward_oot(positions, query, key)


class AcmeApply(ApplyRotaryEmb):
    def __init__(self, enforce_enable=False, is_neox_style=True, enable_fp32_compute=False):
        super().__init__(enforce_enable=enforce_enable, is_neox_style=is_neox_style,
                         enable_fp32_compute=enable_fp32_compute)

    def forward_oot(self, x, cos, sin):
        x, cos, sin, origin_shape, origin_dtype = self._pre_process(x, cos, sin)
        assert x.dim() == 4
        left, right = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        output = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return self._post_process(output, origin_shape, origin_dtype)


REGISTERED_OPS = {"RotaryEmbedding": AcmeRotary, "DeepseekScalingRotaryEmbedding": AcmeDeepseek,
                  "MRotaryEmbedding": AcmeMRotary, "ApplyRotaryEmb": AcmeApply, "SiluAndMulClamp": AcmeRotary}
"""


def install(site: Any, classes: str, registration: str = TABLE) -> None:
    """A plugin of these classes, loaded."""
    site.plugin("acme", PLUGIN.format(classes=classes, registration=registration))
    opgraft.reset()
    load_plugins()
    assert host_state().plugins["acme"].status.value == "activated", host_state().plugins["acme"]


def findings() -> list[str]:
    """What the doctor says of the plugin's replacements."""
    return [finding.message for finding in outcomes.findings_of(host_state().plugins["acme"])]


def assert_agrees(op: Any, cls: str, *arguments: Any) -> None:
    """The op is an instance of the plugin's class, and its kernel computes what its native definition does."""
    assert op.op_class.__name__ == cls
    with torch.no_grad():
        torch.testing.assert_close(op(*arguments), op.forward_native(*arguments))


def test_a_table_of_rotary_embeddings(site) -> None:
    """Required keys, missing offsets, own constructors and one dead target: the plugin works, the doctor tells."""
    install(site, ROTARY)
    positions, query, key = torch.arange(7), torch.randn(7, 3 * 48), torch.randn(7, 48)
    assert_agrees(
        ops.RotaryEmbedding(48, 32, 64, 1e4, True, torch.float32),
        "AcmeRotary",
        positions,
        query,
        key,
    )
    deepseek = ops.DeepseekScalingRotaryEmbedding(48, 48, 64, 1e4, False, 4.0, torch.float32)
    assert deepseek.mscale == 1.5
    assert_agrees(deepseek, "AcmeDeepseek", positions, query, key)
    multimodal = ops.MRotaryEmbedding(48, 48, 64, 1e4, True, torch.float32, [10, 8, 6], True)
    assert_agrees(multimodal, "AcmeMRotary", torch.randint(0, 64, (3, 7)), query, query)
    assert_agrees(multimodal, "AcmeMRotary", positions, query, query)
    half = torch.randn(7, 3, 48).bfloat16()
    assert_agrees(
        ops.ApplyRotaryEmb(enable_fp32_compute=True),
        "AcmeApply",
        half,
        *torch.randn(2, 7, 24).bfloat16(),
    )
    text = "\n".join(findings())
    assert "replaces 'SiluAndMulClamp', which no registered op answers to" in text
    assert "AcmeRotary.forward_oot" in text
    assert "missing a required argument: 'key'" in text
    assert "init_cache" in text
    assert (
        len(findings()) == 5
    )  # three methods that require a key, a constructor of its time, and the dead target


SCALED = """
from opgraft.ops import (DynamicNTKScalingRotaryEmbedding, LinearScalingRotaryEmbedding, Llama3RotaryEmbedding,
                         Llama4VisionRotaryEmbedding, Phi3LongRoPEScaledRotaryEmbedding)


def prepare(op, table, positions, offsets):
    positions = positions.flatten() if offsets is None else (positions + offsets).flatten()
    cos, sin = table.index_select(0, positions).view(len(positions), 1, -1).chunk(2, dim=-1)
    op.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
    op.register_buffer("sin", torch.cat((sin, sin), dim=-1), persistent=False)


def turn(op, x):
    heads = x.view(len(op.cos), -1, op.head_size)
    left, right = heads.chunk(2, dim=-1)
    return (heads * op.cos + torch.cat((-right, left), dim=-1) * op.sin).reshape(x.shape)


@LinearScalingRotaryEmbedding.register_oot
class AcmeLinear(LinearScalingRotaryEmbedding):
    def forward_oot(self, positions, query, key, offsets=None):
        assert hasattr(self, "scaling_factors")
        prepare(self, self.cos_sin_cache, positions, offsets)
        return turn(self, query), turn(self, key)


@DynamicNTKScalingRotaryEmbedding.register_oot
class AcmeDynamic(DynamicNTKScalingRotaryEmbedding):
    forward_oot = AcmeLinear.forward_oot
    scaling_factors = ()


@CustomOp.register_oot(name="Phi3LongRoPEScaledRotaryEmbedding")
class AcmeLong(Phi3LongRoPEScaledRotaryEmbedding):
    def forward_oot(self, positions, query, key, offsets=None):
        prepare(self, self.long_short_cos_sin_cache[self.original_max_position_embeddings :], positions, offsets)
        return turn(self, query), turn(self, key)


@Llama4VisionRotaryEmbedding.register_oot
class AcmeVision(Llama4VisionRotaryEmbedding):
    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype):
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, torch.float)

    def _compute_cos_sin_cache(self):
        self.freqs = super()._compute_cos_sin_cache()
        return torch.cat((self.freqs.real, self.freqs.imag), dim=-1)

    def forward_native(self, query, key=None):
        pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (query, key)]
        return tuple(torch.view_as_real(x * self.freqs).flatten(-2) for x in pairs)

    def forward_oot(self, query, key):
        cos, sin = (half[None] for half in self.cos_sin_cache.to(query.device).chunk(2, dim=-1))
        pairs = [x.unflatten(-1, (-1, 2)).unbind(-1) for x in (query, key)]
        turned = [torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1) for a, b in pairs]
        return tuple(x.flatten(-2) for x in turned)
"""


def test_decorated_rotary_embeddings_that_keep_cosines(site) -> None:
    """Replacements by decorators, which prepare buffers of their own from the tables of further rope classes."""
    install(site, SCALED, "    pass")
    positions, query, key = torch.arange(7), torch.randn(7, 3 * 48), torch.randn(7, 48)
    sizes = (48, 48, 64, 1e4, True)
    linear = ops.LinearScalingRotaryEmbedding(*sizes, [1.0, 2.0], torch.float32)
    assert_agrees(
        linear, "AcmeLinear", positions + linear.scaling_factor_to_offset[2.0], query, key
    )
    dynamic = ops.DynamicNTKScalingRotaryEmbedding(48, 48, 64, 32, 1e4, True, 2.0, torch.float32)
    assert_agrees(dynamic, "AcmeDynamic", positions, query, key)
    factors = [1.0 + i / 9 for i in range(24)]
    long = ops.Phi3LongRoPEScaledRotaryEmbedding(
        48, 48, 64, 32, 1e4, True, torch.float32, factors, factors
    )
    assert_agrees(long, "AcmeLong", positions, query, key)
    rope = {"rope_type": "mllama4", "partial_rotary_factor": 0.5}
    image = torch.randn(2, 37, 3, 48)
    assert_agrees(ops.get_rope(48, 36, False, rope, torch.complex64), "AcmeVision", image, image)


ENCODER = """
from opgraft.ops import MMEncoderAttention
from torch.nn import functional as F


@MMEncoderAttention.register_oot()
class AcmeAttention(MMEncoderAttention):
    def __init__(self, num_heads, head_size, scale=None, num_kv_heads=None, prefix=""):
        super().__init__(num_heads, head_size, scale, num_kv_heads, prefix)
        self.calls = []
{methods}
"""

OVERRIDES = {
    "the helper of the native definition": """
    def _forward_sdpa(self, query, key, value, cu_seqlens=None):
        self.calls.append("sdpa")
        bsz, q_len, kv_len = *query.size()[:2], key.size(1)
        query, key, value = self.view_qkv_to_4d(query, key, value, bsz, q_len, kv_len)
        if (repeats := self.num_queries_per_kv) > 1:
            key, value = (torch.repeat_interleave(x, repeats, dim=2) for x in (key, value))
        parts = [x.transpose(1, 2) for x in (query, key, value)]
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist() if cu_seqlens is not None else [q_len]
        attended = [F.scaled_dot_product_attention(q, k, v, scale=self.scale)
                    for q, k, v in zip(*(torch.split(x, lengths, dim=2) for x in parts))]
        return torch.cat(attended, dim=2).transpose(1, 2).reshape(bsz, q_len, -1)
""",
    "the helper of the kernel for GPUs": """
    def _forward_fa(self, query, key, value, cu_seqlens=None, max_seqlen=None):
        self.calls.append("fa")
        return self._forward_sdpa(query, key, value, cu_seqlens)

    def forward_oot(self, *args, **kwargs):
        return self.forward_cuda(*args, **kwargs)
""",
    "a kernel beside a helper that is named like one": """
    def forward_oot(self, query, key, value, cu_seqlens=None, max_seqlen=None, sequence_lengths=None):
        self.calls.append("oot")
        return self.forward_xpu(self, query, key, value, cu_seqlens)

    @staticmethod
    def forward_xpu(op, q, k, v, bounds):
        return op._forward_sdpa(q, k, v, bounds)
""",
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_encoder_attention_that_overrides_helpers(site, name: str) -> None:
    """Whichever of the helpers a plugin overrides or calls, its code runs and the result is that of the op."""
    plain = ops.MMEncoderAttention(4, 16, num_kv_heads=2)
    install(site, ENCODER.format(methods=OVERRIDES[name]), "    pass")
    op = ops.MMEncoderAttention(4, 16, num_kv_heads=2, prefix="encoder.0")
    assert (op.op_class.__name__, op.layer_name) == ("AcmeAttention", "encoder.0")
    query, key, value = torch.randn(1, 9, 64), torch.randn(1, 9, 32), torch.randn(1, 9, 32)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = ops.MMEncoderAttention.forward_native(plain, query, key, value, bounds)
    torch.testing.assert_close(op(query, key, value, bounds, torch.tensor(5)), expected)
    assert len(op.calls) == 1
    assert ops.MMEncoderAttention.compute_max_seqlen(None, [0, 4, 9]) == 5
    assert any("multimodal_config" in finding for finding in findings())


COUNTED = """
from opgraft.ops import RMSNorm, SiluAndMul
from opgraft.custom_op import maybe_get_oot_by_class, op_registry, op_registry_oot

layers = []


def acme_rms_norm(x: torch.Tensor, layer: int, residual: torch.Tensor | None = None) -> torch.Tensor:
    logger.warning_once("running on the host")
    return layers[layer].forward_native(x, residual)


def acme_rms_norm_fake(x: torch.Tensor, layer: int, residual: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op(op_name="acme_rms_norm", op_func=acme_rms_norm, mutates_args=[],
                          fake_impl=acme_rms_norm_fake)


@RMSNorm.register_oot(name="RMSNorm")
class AcmeRMSNorm(RMSNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.layer = len(layers)
        layers.append(self)

    def forward(self, x, residual=None):
        if residual is None:
            return torch.ops.opgraft.acme_rms_norm(x, self.layer, residual)
        return self.forward_native(x, residual)


@SiluAndMul.register_oot
class AcmeSiluAndMul(SiluAndMul):
    def __init__(self, *, compile_native=True):
        super().__init__(compile_native=compile_native)
        assert op_registry["silu_and_mul"] is SiluAndMul
        assert op_registry_oot["SiluAndMul"] is maybe_get_oot_by_class(SiluAndMul)

    @classmethod
    def enabled(cls):
        return not CustomOp.default_on()

    def forward_oot(self, x):
        return x.chunk(2, dim=-1)[0] * 0
"""


def test_layers_behind_an_op_of_the_plugins_own(site) -> None:
    """A forward that calls a registered op, the registries, and a replacement that says whether it is enabled."""
    install(site, COUNTED, "    pass")
    norm = ops.RMSNorm(8)
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = norm.forward_native(x)
        assert torch.equal(norm(x), expected)
        compiled = torch.compile(norm, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)
    assert torch.equal(ops.SiluAndMul()(x), ops.SiluAndMul.forward_native(x))
    none = opgraft.CompilationConfig(custom_ops=["none"])
    with set_config(OpgraftConfig(compilation_config=none)):
        assert (ops.SiluAndMul()(x) == 0).all()
