"""Bamba: Mamba-2's mixers, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.models.decoder import PACKED_MODULES, DecoderAttention, rope_of
from opgraft.models.decoder_config import PARTIAL_ROPE, DecoderFamily, DecoderShape
from opgraft.models.decoder_mlp import DecoderMLP
from opgraft.models.hybrid import HybridForCausalLM, HybridLayer, expect_mixers, expect_unlimited
from opgraft.models.names import ShardId, WeightsMapper
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.state_space import MambaMixer2
from torch import nn


@PluggableClass.register("BambaForCausalLM")
class BambaForCausalLM(HybridForCausalLM):
    """Bamba, by IBM, Princeton and UIUC: Mamba-2's mixers (arXiv:2405.21060) and some attention."""

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = PACKED_MODULES
    embedding_weight: ClassVar[str] = "model.embed_tokens.weight"
    weights_mapper = WeightsMapper(
        substrings={
            ".mamba.": ".mixer.",
            ".self_attn.": ".mixer.",
            ".A_log": ".A",
            ".feed_forward.": ".mlp.",
            ".input_layernorm.": ".mixer_norm.",
            ".pre_ff_layernorm.": ".mlp_norm.",
            ".final_layernorm.": ".norm.",
        },
        base="model",
    )

    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return a layer for each of the config's ``layers_block_type``."""
        expect_mixers(
            config,
            "mamba_d_state",
            "mamba_d_conv",
            "mamba_n_groups",
            "mamba_n_heads",
            "mamba_d_head",
        )
        expect_unlimited(config)
        family = DecoderFamily(reads=frozenset({PARTIAL_ROPE}))
        kinds = config.layers_block_type
        longest = self.opgraft_config.model.max_model_len
        # Decoders have no mixers. The shapes of these layers are not read.
        decoder_kinds = ["full_attention"] * len(kinds)
        shape = DecoderShape.of(config, family, longest, layer_types=decoder_kinds)
        self.max_position = shape.max_position
        # Only layers of attention rotate, all in one way.
        [rope] = [rope_of(shape, parameters) for parameters in shape.ropes.values()]
        layers = []
        for number in self.stage.layers:
            path = f"{prefix}.{number}"
            mixer: nn.Module
            if kinds[number] == "full_attention":
                attention_path = f"{path}.self_attn"
                mixer = DecoderAttention(shape, family, number, rope, quant_config, attention_path)
            else:
                mixer = _mixer(config, quant_config, f"{path}.mamba")
            mlp = DecoderMLP(shape, quant_config, f"{path}.feed_forward")
            layers.append(HybridLayer(mixer, mlp, shape.hidden_size, shape.eps))
        return layers, shape.eps


def _mixer(config: Any, quant_config: QuantizationConfig | None, prefix: str) -> MambaMixer2:
    return MambaMixer2(
        config.hidden_size,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_expand * config.hidden_size,
        config.mamba_conv_bias,
        config.mamba_proj_bias,
        config.mamba_n_groups,
        config.mamba_n_heads,
        config.mamba_d_head,
        config.rms_norm_eps,
        config.hidden_act,
        quant_config=quant_config,
        prefix=prefix,
    )
