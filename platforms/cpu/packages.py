"""Distributions with more kernels for CPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

KERNEL_PACKAGES: Mapping[str, Collection[str]] = {
    "opgraft-cpu-kernels": frozenset(
        {
            "apply_rotary_emb",
            "attention",
            "causal_conv1d",
            "causal_conv1d_update",
            "dual_chunk_rotary_embedding",
            "fatrelu_and_mul",
            "gated_mlp",
            "gelu",
            "gelu_and_mul",
            "gelu_and_mul_sparse",
            "gelu_fast",
            "gelu_new",
            "gelu_tanh",
            "gemma_rms_norm",
            "int8_dynamic_linear",
            "layer_norm",
            "linear",
            "lora",
            "lossless_linear",
            "mixer2_gated_rms_norm",
            "mla_attention",
            "mla_paged_attention",
            "mul_and_silu",
            "quant_fp8",
            "quantized_fused_moe",
            "quantized_linear",
            "quick_gelu",
            "relu2",
            "rms_norm",
            "rms_norm_gated",
            "rotary_embedding",
            "scaled_dot_product_attention",
            "selective_scan",
            "selective_state_update",
            "silu",
            "silu_and_mul",
            "silu_and_mul_with_clamp",
            "swigluoai_and_mul",
            "swiglustep_and_mul",
            "unquantized_fused_moe",
            "xielu",
        }
    ),
}
"""Distribution → names of the ops with a kernel."""
