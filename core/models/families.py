"""The families of decoders, each with the name of the architecture in ``transformers``."""

from __future__ import annotations

import dataclasses

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.models.decoder import DecoderForCausalLM
from opgraft.models.decoder_config import (
    GEMMA_SCALES,
    GRANITE_SCALES,
    PARTIAL_ROPE,
    DecoderFamily,
)
from opgraft.models.decoder_experts import ExpertsFamily
from opgraft.models.names import WeightsMapper

_GEMMA2 = DecoderFamily(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    gemma_norm=True,
    scaled_embedding=True,
    reads=GEMMA_SCALES,
)


@PluggableClass.register("LlamaForCausalLM")
class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1 to 3 (arXiv:2302.13971), and SmolLM, which shares the architecture."""


@PluggableClass.register("MistralForCausalLM")
class MistralForCausalLM(DecoderForCausalLM):
    """Mistral (arXiv:2310.06825): Llama with a window."""

    family = DecoderFamily(windowed=True)


@PluggableClass.register("Qwen2ForCausalLM")
class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5 (arXiv:2407.10671): biases of query, key and value."""

    family = DecoderFamily(qkv_bias=True)


@PluggableClass.register("Qwen3ForCausalLM")
class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3 (arXiv:2505.09388): norms of the heads of query and key."""

    family = DecoderFamily(qk_norm="head")


@PluggableClass.register("Phi3ForCausalLM")
class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3 (arXiv:2404.14219): checkpoints have merged weights, as opgraft's layers do."""

    family = DecoderFamily(windowed=True, reads=frozenset({PARTIAL_ROPE}))


@PluggableClass.register("GemmaForCausalLM")
class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma (arXiv:2403.08295): norms scale by one plus their weight, embeddings are scaled."""

    family = DecoderFamily(gemma_norm=True, scaled_embedding=True)


@PluggableClass.register("Gemma2ForCausalLM")
class Gemma2ForCausalLM(DecoderForCausalLM):
    """Gemma 2 (arXiv:2408.00118): norms before and after each part, caps, windows in some layers.

    Caps bound the scores of attention and the logits.
    """

    family = _GEMMA2


@PluggableClass.register("Gemma3ForCausalLM")
class Gemma3ForCausalLM(DecoderForCausalLM):
    """Gemma 3 (arXiv:2503.19786): Gemma 2 without caps, with norms of query and key.

    Layers with a window and layers without have different ropes.
    """

    family = dataclasses.replace(_GEMMA2, qk_norm="head")


@PluggableClass.register("GraniteForCausalLM")
class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3: Llama with scales of embeddings, residuals, scores and logits."""

    family = DecoderFamily(reads=GRANITE_SCALES)


@PluggableClass.register("Olmo2ForCausalLM")
class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2 (arXiv:2501.00656): norms after each part only, and one norm for all heads at once."""

    family = DecoderFamily(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        qk_norm="whole",
    )


@PluggableClass.register("MixtralForCausalLM")
class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral (arXiv:2401.04088): Mistral with experts."""

    family = DecoderFamily(windowed=True, experts=ExpertsFamily())
    # Checkpoints have a name of their own for the feed-forward layer.
    weights_mapper = WeightsMapper(substrings={".block_sparse_moe.": ".mlp."}, base="model")


@PluggableClass.register("Qwen3MoeForCausalLM")
class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3 with experts (arXiv:2505.09388), in all layers or in some."""

    family = DecoderFamily(qk_norm="head", windowed=True, experts=ExpertsFamily(renormalize=None))


@PluggableClass.register("OlmoeForCausalLM")
class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE (arXiv:2409.02060): experts, and one norm for all heads at once."""

    family = DecoderFamily(qk_norm="whole", experts=ExpertsFamily(renormalize=None))


@PluggableClass.register("GptOssForCausalLM")
class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss (arXiv:2508.10925): experts with biases and a clipped gate, sinks, some windows."""

    family = DecoderFamily(
        sinks=True,
        experts=ExpertsFamily(activation="swigluoai", has_bias=True, transposed_checkpoint=True),
    )
    weights_mapper = WeightsMapper(
        substrings={".mlp.router.": ".mlp.gate.", ".self_attn.sinks": ".self_attn.attn.sinks"},
        base="model",
    )
