"""The op classes of this plugin. Each class replaces the catalogue's class of the same name.

A class lists kernels for the functional forms of its op, and opgraft makes ``forward_cpu`` of
them. The kernels have no backward. If a gradient is required, opgraft's native definition runs, or
opgraft's own kernel for linear layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import opgraft
import torch
from opgraft import ops as catalogue
from opgraft.kernels import UnquantizedLinearMethod
from opgraft.ops import AttentionBatch, LayerPages, current_batch
from torch import Tensor

from opgraft_cpu_kernels import (
    attention,
    dense_attention,
    experts,
    kernels,
    latent_attention,
    linear,
    lora,
    lossless,
    quantized,
    quantized_experts,
    steps,
    summed_norms,
)
from opgraft_cpu_kernels.library import missing


def _kernels(*names: str) -> opgraft.FunctionalKernels:
    """Return the kernels of these functional forms, which need the library."""
    functions = {}
    for name in names:
        module = summed_norms if name.startswith("all_reduce") else kernels
        functions[name] = getattr(module, name)
    return opgraft.FunctionalKernels(functions, needs=missing, inference_only=True)


class RMSNorm(catalogue.RMSNorm):
    functional_cpu = _kernels(
        "rms_norm",
        "fused_add_rms_norm",
        "fused_add_rms_norm_",
        "rms_norm_quant_fp8_static",
        "rms_norm_quant_fp8_dynamic",
        "fused_add_rms_norm_quant_fp8_static",
        "fused_add_rms_norm_quant_fp8_dynamic",
        "all_reduce_rms_norm",
        "all_reduce_rms_norm_quant_fp8_static",
        "all_reduce_rms_norm_quant_fp8_dynamic",
    )


class GemmaRMSNorm(catalogue.GemmaRMSNorm):
    functional_cpu = _kernels(
        "gemma_rms_norm",
        "fused_add_gemma_rms_norm",
        "fused_add_gemma_rms_norm_",
        "all_reduce_gemma_rms_norm",
    )


class LayerNorm(catalogue.LayerNorm):
    functional_cpu = _kernels("layer_norm")


class RMSNormGated(catalogue.RMSNormGated):
    functional_cpu = _kernels("rms_norm_gated")


class Mixer2RMSNormGated(catalogue.Mixer2RMSNormGated):
    functional_cpu = _kernels("mixer2_gated_rms_norm")


class SiluAndMul(catalogue.SiluAndMul):
    functional_cpu = _kernels(
        "silu_and_mul", "silu_and_mul_quant_fp8_static", "silu_and_mul_quant_fp8_dynamic"
    )


class MulAndSilu(catalogue.MulAndSilu):
    functional_cpu = _kernels("mul_and_silu")


class GeluAndMul(catalogue.GeluAndMul):
    functional_cpu = _kernels("gelu_and_mul")


class GeluAndMulSparse(catalogue.GeluAndMulSparse):
    functional_cpu = _kernels("gelu_and_mul_sparse")


class FatreluAndMul(catalogue.FatreluAndMul):
    functional_cpu = _kernels("fatrelu_and_mul")


class SwigluOAIAndMul(catalogue.SwigluOAIAndMul):
    functional_cpu = _kernels("swigluoai_and_mul")


class SiluAndMulWithClamp(catalogue.SiluAndMulWithClamp):
    functional_cpu = _kernels("silu_and_mul_with_clamp")


class SwigluStepAndMul(catalogue.SwigluStepAndMul):
    functional_cpu = _kernels("swiglustep_and_mul")


class GELU(catalogue.GELU):
    functional_cpu = _kernels("gelu")


class GELUTanh(catalogue.GELUTanh):
    functional_cpu = _kernels("gelu_tanh")


class NewGELU(catalogue.NewGELU):
    functional_cpu = _kernels("gelu_new")


class FastGELU(catalogue.FastGELU):
    functional_cpu = _kernels("gelu_fast")


class QuickGELU(catalogue.QuickGELU):
    functional_cpu = _kernels("quick_gelu")


class SiLU(catalogue.SiLU):
    functional_cpu = _kernels("silu", "silu_")


class ReLUSquaredActivation(catalogue.ReLUSquaredActivation):
    functional_cpu = _kernels("relu2")


class CausalConv1d(catalogue.CausalConv1d):
    functional_cpu = _kernels("causal_conv1d")


class CausalConv1dUpdate(catalogue.CausalConv1dUpdate):
    functional_cpu = _kernels("causal_conv1d_update")


class SelectiveScan(catalogue.SelectiveScan):
    functional_cpu = _kernels("selective_scan")


class SelectiveStateUpdate(catalogue.SelectiveStateUpdate):
    functional_cpu = _kernels("selective_state_update")


class XIELU(catalogue.XIELU):
    functional_cpu = _kernels("xielu")


class ApplyRotaryEmb(catalogue.ApplyRotaryEmb):
    functional_cpu = _kernels("apply_rotary_emb")

    def rotate_heads(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] | None = None
        if steps.runs(self, ApplyRotaryEmb.forward_cpu):
            rotated = steps.rotate_heads(query, key, cos, sin, self.is_neox_style)
        if rotated is None:
            return super().rotate_heads(query, key, cos, sin)
        return rotated


class RotaryEmbedding(catalogue.RotaryEmbedding):
    functional_cpu = _kernels("rotary_embedding", "rotary_embedding_", "qk_norm_rope")


class MRotaryEmbedding(catalogue.MRotaryEmbedding):
    functional_cpu = _kernels("rotary_embedding", "mrope")


class DualChunkRotaryEmbedding(catalogue.DualChunkRotaryEmbedding):
    functional_cpu = _kernels("dual_chunk_rotary_embedding")


class QuantFP8(catalogue.QuantFP8):
    functional_cpu = _kernels("quant_fp8_static", "quant_fp8_dynamic")


class QuantizedLinear(catalogue.QuantizedLinear):
    functional_cpu = opgraft.FunctionalKernels(
        {"quantized_linear": quantized.quantized_linear}, needs=missing, inference_only=True
    )


class Int8DynamicLinear(catalogue.Int8DynamicLinear):
    functional_cpu = opgraft.FunctionalKernels(
        {"int8_dynamic_linear": quantized.int8_dynamic_linear}, needs=missing, inference_only=True
    )


class LosslessLinear(catalogue.LosslessLinear):
    functional_cpu = opgraft.FunctionalKernels(
        {"lossless_linear": lossless.lossless_linear}, needs=missing, inference_only=True
    )


class LoRA(catalogue.LoRA):
    functional_cpu = opgraft.FunctionalKernels(
        {"add_lora_": lora.add_lora_}, needs=missing, inference_only=True
    )


class Linear(catalogue.Linear):
    functional_cpu: ClassVar = opgraft.FunctionalKernels(
        {"linear": linear.linear}, compiled={"linear": linear.compiled}
    )

    @opgraft.needs(missing)
    def forward_cpu(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        # Looking parameters up as attributes takes torch as long as the rest of a call.
        parameters = self._parameters
        weight = parameters.get("weight")
        plain = type(self.quant_method) is UnquantizedLinearMethod and self._packed is None
        if plain and weight is not None and "bias" in parameters:
            return linear.linear(input, weight, parameters["bias"], self.activation, residual)
        return self.quant_method.apply(
            self,
            input,
            self.bias,
            activation=self.activation,
            residual=residual,
            kernel=linear.linear,
        )


class GatedMLP(catalogue.GatedMLP):
    def at_once(self, joint: catalogue.Linear, x: Tensor) -> Tensor:
        modules: dict[str, Any] = self._modules
        # The names are those of gate, up and down, in this order.
        down = modules[self.names[2]]
        activation = modules["act_and_mul"]
        out = None
        maps = type(down) is type(joint) and steps.runs(down, Linear.forward_cpu)
        if maps and steps.runs(activation, SiluAndMul.forward_cpu, GeluAndMul.forward_cpu):
            out = steps.gated_mlp(joint, down, x, self.activation)
        if out is None:
            return super().at_once(joint, x)
        return out


class UnquantizedFusedMoEMethod(catalogue.UnquantizedFusedMoEMethod):
    functional_cpu = opgraft.FunctionalKernels(
        {"fused_experts": experts.fused_experts}, needs=missing, inference_only=True
    )


class QuantizedFusedMoEMethod(catalogue.QuantizedFusedMoEMethod):
    functional_cpu = opgraft.FunctionalKernels(
        {"quantized_experts": quantized_experts.quantized_experts},
        needs=missing,
        inference_only=True,
    )


class ScaledDotProductAttention(catalogue.ScaledDotProductAttention):
    functional_cpu = opgraft.FunctionalKernels(
        {
            "scaled_dot_product_attention": dense_attention.scaled_dot_product_attention,
            "scaled_dot_product_attention_quant_fp8_static": (
                dense_attention.scaled_dot_product_attention_quant_fp8_static
            ),
        },
        needs=missing,
        inference_only=True,
    )


class MLAPagedAttention(catalogue.MLAPagedAttention):
    functional_cpu = opgraft.FunctionalKernels(
        {"mla_paged_attention": latent_attention.mla_paged_attention},
        needs=missing,
        inference_only=True,
    )


class MLAAttention(catalogue.MLAAttention):
    def by_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        products = latent_attention.by_heads(x, weight)
        if products is None:
            return super().by_heads(x, weight)
        return products


class Attention(catalogue.Attention):
    def kv_cache_shape(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        if not attention.takes(self.head_size, block_size):
            return super().kv_cache_shape(num_blocks, block_size, dtype)
        return attention.cache_shape(
            num_blocks, self.num_kv_heads, block_size, self.head_size, dtype
        )

    def holds_codes(self) -> bool:
        return True

    def batch_invariant(self, block_size: int) -> bool:
        return attention.takes(self.head_size, block_size)

    def idle(self) -> frozenset[str]:
        batch = current_batch()
        if batch is None or not attention.takes(self.head_size, batch.block_size):
            return super().idle()
        return frozenset({"attend", "write", "attend_pages"})

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        if not attention.takes(self.head_size, batch.block_size):
            return super().attend_batch(batch, pages, query, key, value)
        settings = (self.scale, self.sliding_window, self.logits_soft_cap, self.sinks)
        return attention.attend(batch, pages, query, key, value, *settings)


REPLACEMENTS = (
    RMSNorm,
    GemmaRMSNorm,
    LayerNorm,
    RMSNormGated,
    Mixer2RMSNormGated,
    SiluAndMul,
    MulAndSilu,
    GeluAndMul,
    GeluAndMulSparse,
    FatreluAndMul,
    SwigluOAIAndMul,
    SiluAndMulWithClamp,
    SwigluStepAndMul,
    GELU,
    GELUTanh,
    NewGELU,
    FastGELU,
    QuickGELU,
    SiLU,
    ReLUSquaredActivation,
    XIELU,
    CausalConv1d,
    CausalConv1dUpdate,
    SelectiveScan,
    SelectiveStateUpdate,
    ApplyRotaryEmb,
    RotaryEmbedding,
    MRotaryEmbedding,
    DualChunkRotaryEmbedding,
    QuantFP8,
    QuantizedLinear,
    Int8DynamicLinear,
    LosslessLinear,
    LoRA,
    Linear,
    GatedMLP,
    UnquantizedFusedMoEMethod,
    QuantizedFusedMoEMethod,
    ScaledDotProductAttention,
    MLAPagedAttention,
    MLAAttention,
    Attention,
)
