"""The op classes that bring the kernels, each as a module's ``forward_cpu`` and as the functional forms of its op.

None has a backward: where a gradient is required, the native definition runs, or what opgraft has for linear layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import opgraft
from opgraft import ops as catalogue
from torch import Tensor

from opgraft_cpu_kernels import kernels, linear
from opgraft_cpu_kernels.library import missing


class RMSNorm(catalogue.RMSNorm):
    functional_cpu: ClassVar = {
        "rms_norm": kernels.rms_norm,
        "fused_add_rms_norm": kernels.fused_add_rms_norm,
        "fused_add_rms_norm_": kernels.fused_add_rms_norm_,
    }

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.variance_epsilon, self.variance_size_override)
        weight, size = self.weight, self.variance_size_override
        return kernels.fused_add_rms_norm(x, residual, weight, self.variance_epsilon, size)


class GemmaRMSNorm(catalogue.GemmaRMSNorm):
    functional_cpu: ClassVar = {
        "gemma_rms_norm": kernels.gemma_rms_norm,
        "fused_add_gemma_rms_norm": kernels.fused_add_gemma_rms_norm,
        "fused_add_gemma_rms_norm_": kernels.fused_add_gemma_rms_norm_,
    }

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return kernels.gemma_rms_norm(x, self.weight, self.variance_epsilon)
        return kernels.fused_add_gemma_rms_norm(x, residual, self.weight, self.variance_epsilon)


class LayerNorm(catalogue.LayerNorm):
    functional_cpu: ClassVar = {"layer_norm": kernels.layer_norm}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, input: Tensor) -> Any:
        return kernels.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNormGated(catalogue.RMSNormGated):
    functional_cpu: ClassVar = {"rms_norm_gated": kernels.rms_norm_gated}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor, z: Tensor | None = None) -> Any:
        settings = (self.group_size, self.norm_before_gate, self.activation)
        return kernels.rms_norm_gated(x, self.weight, z, self.variance_epsilon, *settings)


class SiluAndMul(catalogue.SiluAndMul):
    functional_cpu: ClassVar = {"silu_and_mul": kernels.silu_and_mul}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.silu_and_mul(x)


class MulAndSilu(catalogue.MulAndSilu):
    functional_cpu: ClassVar = {"mul_and_silu": kernels.mul_and_silu}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.mul_and_silu(x)


class GeluAndMul(catalogue.GeluAndMul):
    functional_cpu: ClassVar = {"gelu_and_mul": kernels.gelu_and_mul}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.gelu_and_mul(x, self.approximate)


class GeluAndMulSparse(catalogue.GeluAndMulSparse):
    functional_cpu: ClassVar = {"gelu_and_mul_sparse": kernels.gelu_and_mul_sparse}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.gelu_and_mul_sparse(x, self.activation_sparsity, self.approximate)


class FatreluAndMul(catalogue.FatreluAndMul):
    functional_cpu: ClassVar = {"fatrelu_and_mul": kernels.fatrelu_and_mul}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.fatrelu_and_mul(x, self.threshold)


class SwigluOAIAndMul(catalogue.SwigluOAIAndMul):
    functional_cpu: ClassVar = {"swigluoai_and_mul": kernels.swigluoai_and_mul}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.swigluoai_and_mul(x, self.alpha, self.limit)


class SiluAndMulWithClamp(catalogue.SiluAndMulWithClamp):
    functional_cpu: ClassVar = {"silu_and_mul_with_clamp": kernels.silu_and_mul_with_clamp}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.silu_and_mul_with_clamp(x, self.swiglu_limit) if self.is_plain else self.forward_native(x)


class SwigluStepAndMul(catalogue.SwigluStepAndMul):
    functional_cpu: ClassVar = {"swiglustep_and_mul": kernels.swiglustep_and_mul}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.swiglustep_and_mul(x, self.limit)


class GELU(catalogue.GELU):
    functional_cpu: ClassVar = {"gelu": kernels.gelu}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, input: Tensor) -> Any:
        return kernels.gelu(input, self.approximate)


class GELUTanh(catalogue.GELUTanh):
    functional_cpu: ClassVar = {"gelu_tanh": kernels.gelu_tanh}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.gelu_tanh(x)


class NewGELU(catalogue.NewGELU):
    functional_cpu: ClassVar = {"gelu_new": kernels.gelu_new}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.gelu_new(x)


class FastGELU(catalogue.FastGELU):
    functional_cpu: ClassVar = {"gelu_fast": kernels.gelu_fast}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.gelu_fast(x)


class QuickGELU(catalogue.QuickGELU):
    functional_cpu: ClassVar = {"quick_gelu": kernels.quick_gelu}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.quick_gelu(x)


class SiLU(catalogue.SiLU):
    functional_cpu: ClassVar = {"silu": kernels.silu, "silu_": kernels.silu_}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, input: Tensor) -> Any:
        if self.inplace:
            kernels.silu_(input)
            return input
        return kernels.silu(input)


class ReLUSquaredActivation(catalogue.ReLUSquaredActivation):
    functional_cpu: ClassVar = {"relu2": kernels.relu2}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor) -> Any:
        return kernels.relu2(x)


class XIELU(catalogue.XIELU):
    functional_cpu: ClassVar = {"xielu": kernels.xielu}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, input: Tensor) -> Any:
        return kernels.xielu(input, self.alpha_p, self.alpha_n, self.beta, self.eps)


class ApplyRotaryEmb(catalogue.ApplyRotaryEmb):
    functional_cpu: ClassVar = {"apply_rotary_emb": kernels.apply_rotary_emb}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return kernels.apply_rotary_emb(x, cos, sin, self.is_neox_style)


class RotaryEmbedding(catalogue.RotaryEmbedding):
    functional_cpu: ClassVar = {
        "rotary_embedding": kernels.rotary_embedding,
        "rotary_embedding_": kernels.rotary_embedding_,
    }

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return self._rotated(kernels.rotary_embedding, positions, query, key)


class MRotaryEmbedding(catalogue.MRotaryEmbedding):
    functional_cpu: ClassVar = {"mrope": kernels.mrope}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> Any:
        return self._rotated_by(kernels.rotary_embedding, kernels.mrope, positions, query, key, offsets)


class DualChunkRotaryEmbedding(catalogue.DualChunkRotaryEmbedding):
    functional_cpu: ClassVar = {"dual_chunk_rotary_embedding": kernels.dual_chunk_rotary_embedding}

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None) -> Any:
        return self._rotated(kernels.dual_chunk_rotary_embedding, positions, query, key, offsets)


class QuantFP8(catalogue.QuantFP8):
    functional_cpu: ClassVar = {
        "quant_fp8_static": kernels.quant_fp8_static,
        "quant_fp8_dynamic": kernels.quant_fp8_dynamic,
    }

    @opgraft.inference_only
    @opgraft.needs(missing)
    def forward_cpu(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> Any:
        if (scale is not None) != self.static or (self.static and scale_ub is not None):
            return self.forward_native(x, scale, scale_ub)  # which says what is wrong
        if scale is not None:
            return self.pad_tokens(kernels.quant_fp8_static(x, scale, self.group_shape, self.dtype)), scale
        settings = (self.group_shape, scale_ub, self.use_ue8m0, self.dtype)
        quantised, computed = kernels.quant_fp8_dynamic(x, *settings)
        return self.pad_tokens(quantised), self.lay_out_scales(computed)


class Linear(catalogue.Linear):
    functional_cpu: ClassVar = {"linear": linear.linear}

    @opgraft.needs(missing)
    def forward_cpu(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear.linear(input, self.weight, self.bias, self.activation, residual)


REPLACEMENTS = (
    RMSNorm,
    GemmaRMSNorm,
    LayerNorm,
    RMSNormGated,
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
    ApplyRotaryEmb,
    RotaryEmbedding,
    MRotaryEmbedding,
    DualChunkRotaryEmbedding,
    QuantFP8,
    Linear,
)
