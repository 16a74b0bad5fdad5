"""Decoders with layers that carry a state, and mostly with some layers of attention."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError
from opgraft.models.decoder import PACKED_MODULES, DecoderAttention, rope_of
from opgraft.models.decoder_config import DecoderFamily, DecoderShape
from opgraft.models.decoder_mlp import DecoderMLP
from opgraft.models.description import architecture_config, joined, quantization_config
from opgraft.models.given import GivenSettings
from opgraft.models.names import ShardId, WeightsMapper
from opgraft.models.staged import DecoderStack, StagedForCausalLM
from opgraft.ops.embedding import LogitsProcessor, VocabParallelEmbedding
from opgraft.ops.layernorm import RMSNorm
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.state_space import MambaMixer, MambaMixer2, ShortConv
from torch import Tensor, nn


class HybridLayer(nn.Module):
    """One layer: a mixer and mostly a feed-forward layer, each after a norm.

    Args:
        mixer: mixes tokens, by attention or by a state.
        mlp: the feed-forward layer, or ``None``.
        hidden_size: elements of the residual stream.
        eps: the epsilon of the norms.
    """

    def __init__(
        self, mixer: nn.Module, mlp: nn.Module | None, hidden_size: int, eps: float
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.mixer_norm = RMSNorm(hidden_size, eps=eps)
        self.mlp = mlp
        if mlp is not None:
            self.mlp_norm = RMSNorm(hidden_size, eps=eps)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the last part, and the residual stream without that output.

        Args:
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            residual: ``[tokens, hidden_size]``, ``None`` before the first layer.
        """
        hidden_states, residual = normalised(self.mixer_norm, hidden_states, residual)
        mixed = self.mixed(positions, hidden_states)
        if self.mlp is None:
            return mixed, residual
        hidden_states, residual = normalised(self.mlp_norm, mixed, residual)
        return self.mlp(hidden_states), residual

    def mixed(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Call the mixer with ``[tokens, hidden_size]`` and return an output of the same shape."""
        if isinstance(self.mixer, DecoderAttention):
            return self.mixer(positions, hidden_states)  # type: ignore[no-any-return]
        if isinstance(self.mixer, MambaMixer2):
            return self.mixer(hidden_states)  # type: ignore[no-any-return]
        # As in vLLM, the other mixers write into a tensor of the caller's.
        mixed = torch.empty_like(hidden_states)
        self.mixer(hidden_states, mixed)
        return mixed


def normalised(
    norm: nn.Module, hidden_states: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add hidden states ``[tokens, hidden_size]`` to the residual stream and normalise the sum.

    Returns:
        The normalised sum, and the sum. Without a stream, the hidden states are the sum.
    """
    if residual is None:
        return norm(hidden_states), hidden_states
    both: tuple[Tensor, Tensor] = norm(hidden_states, residual)
    return both


class HybridModel(DecoderStack):
    """The stack: token ids to hidden states."""

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states ``[tokens, hidden_size]`` after the last norm.

        A stage that is not the last returns the input of the next stage: see ``DecoderStack.left``.

        Args:
            input_ids: ``[tokens]``; not read beside ``inputs_embeds``.
            positions: ``[tokens]``, the position of each token in its sequence.
            inputs_embeds: see ``DecoderStack.entered``.
        """
        hidden_states, residual = self.entered(input_ids, inputs_embeds)
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        # Each stage has a layer, so that there is a residual stream.
        return self.left(hidden_states, residual)  # type: ignore[arg-type]


class HybridForCausalLM(StagedForCausalLM, ABC):
    """A stack with logits. Each family is a subclass that makes the layers.

    Args:
        opgraft_config: the ``model`` section names the checkpoint with the architecture's config.
        prefix: the path of this model in a larger one.

    Raises:
        ModelError: the config does not describe a model of this family.
    """

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        quant_config = quantization_config(opgraft_config, self)
        config: Any = self.config or architecture_config(opgraft_config)
        path = joined(prefix, "model")
        tied = config.tie_word_embeddings
        self.stage = self.stage_of_rank(config.num_hidden_layers, prefix)
        layers, eps = self.make_layers(config, quant_config, f"{path}.layers")
        # The stack asks for each layer by its number in the whole model.
        by_number = dict(zip(self.stage.layers, layers, strict=True))

        def make_embedding() -> nn.Module:
            return VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=f"{path}.embed_tokens",
            )

        self.model = HybridModel(
            self.stage,
            embedding=make_embedding,
            tied=tied,
            layer=lambda number: by_number[number],
            norm=lambda: RMSNorm(config.hidden_size, eps=eps),
        )
        self.lm_head = self.head(
            config.vocab_size, config.hidden_size, quant_config, prefix, tied=tied
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @abstractmethod
    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return the layers of ``stage``, in order, and the ``eps`` of the last norm.

        Args:
            config: the config of the architecture.
            quant_config: the quantization of the layers.
            prefix: the path of the list of layers.
        """


@PluggableClass.register("Lfm2ForCausalLM")
class Lfm2ForCausalLM(HybridForCausalLM):
    """LFM2 (arXiv:2511.23404): short convolutions with a gate, and attention in some layers."""

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = PACKED_MODULES
    embedding_weight: ClassVar[str] = "model.embed_tokens.weight"
    weights_mapper = WeightsMapper(
        substrings={
            ".self_attn.out_proj.": ".mixer.o_proj.",
            ".self_attn.": ".mixer.",
            ".q_layernorm.": ".q_norm.",
            ".k_layernorm.": ".k_norm.",
            ".conv.conv.": ".mixer.conv.",
            ".conv.in_proj.": ".mixer.in_proj.",
            ".conv.out_proj.": ".mixer.out_proj.",
            ".feed_forward.w1.": ".mlp.gate_proj.",
            ".feed_forward.w3.": ".mlp.up_proj.",
            ".feed_forward.w2.": ".mlp.down_proj.",
            ".operator_norm.": ".mixer_norm.",
            ".ffn_norm.": ".mlp_norm.",
            ".embedding_norm.": ".norm.",
        },
        base="model",
    )

    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return a layer for each of the config's ``layer_types``."""
        GivenSettings(config).size("conv_L_cache")
        family = DecoderFamily(qk_norm="head", qkv_bias=False, output_bias=False)
        longest = self.opgraft_config.model.max_model_len
        # Attention and feed-forward layers are those of decoders, which read configs by a shape.
        shape = DecoderShape.of(config, family, longest, **_settings_of_decoder(config))
        self.max_position = shape.max_position
        ropes = {name: rope_of(shape, parameters) for name, parameters in shape.ropes.items()}
        layers = []
        for number in self.stage.layers:
            path = f"{prefix}.{number}"
            mixer: nn.Module
            if config.layer_types[number] == "conv":
                mixer = ShortConv(
                    config, config.hidden_size, number, None, None, quant_config, f"{path}.conv"
                )
            else:
                rope = ropes[shape.layers[number].rope]
                mixer = DecoderAttention(
                    shape, family, number, rope, quant_config, f"{path}.self_attn"
                )
            mlp = DecoderMLP(shape, quant_config, f"{path}.feed_forward")
            layers.append(HybridLayer(mixer, mlp, shape.hidden_size, shape.eps))
        return layers, shape.eps


def _settings_of_decoder(config: Any) -> dict[str, Any]:
    """Return settings of LFM2 by the names in configs of decoders."""
    # Decoders have no convolutions. The shapes of these layers are not read.
    kinds = ["full_attention" if kind == "conv" else kind for kind in config.layer_types]
    return {
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "layer_types": kinds,
        "intermediate_size": _intermediate_size(config),
    }


def _intermediate_size(config: Any) -> int:
    """Return the size of LFM2's feed-forward layers. The config describes the size indirectly."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    # A gated layer has three matrices in place of two, and as many numbers with this size.
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    size = int(config.block_ffn_dim_multiplier * size)
    multiple = GivenSettings(config).size("block_multiple_of")
    return -(-size // multiple) * multiple


_BACKBONE = WeightsMapper(
    prefixes={"backbone.embedding.": "model.embed_tokens.", "backbone.": "model."},
    # In this order, as each change sees the names after those before. ".norm.weight" also ends the
    # names of a mixer's norm and of the last norm. The two rows after it change these back.
    substrings={
        "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
        ".norm.weight": ".mixer_norm.weight",
        ".mixer.mixer_norm.": ".mixer.norm.",
        "model.mixer_norm.": "model.norm.",
        ".A_log": ".A",
    },
    base="backbone",
)
"""Changes of the names in checkpoints of Mamba and Mamba-2."""


@PluggableClass.register("MambaForCausalLM")
class MambaForCausalLM(HybridForCausalLM):
    """Mamba (arXiv:2312.00752): selective state spaces and nothing else."""

    embedding_weight: ClassVar[str] = "backbone.embeddings.weight"
    weights_mapper = _BACKBONE

    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return the layers, each a mixer."""
        expect_mixers(config, "intermediate_size", "state_size", "conv_kernel", "time_step_rank")
        eps = GivenSettings(config).epsilon("layer_norm_epsilon")
        layers = []
        for number in self.stage.layers:
            mixer = MambaMixer(
                config.hidden_size,
                config.state_size,
                config.conv_kernel,
                config.intermediate_size,
                config.time_step_rank,
                config.use_conv_bias,
                config.use_bias,
                use_rms_norm=False,
                activation=config.hidden_act,
                prefix=f"{prefix}.{number}.mixer",
                quant_config=quant_config,
            )
            layers.append(HybridLayer(mixer, None, config.hidden_size, eps))
        return layers, eps


@PluggableClass.register("Mamba2ForCausalLM")
class Mamba2ForCausalLM(HybridForCausalLM):
    """Mamba-2 (arXiv:2405.21060): state space duality and nothing else."""

    embedding_weight: ClassVar[str] = "backbone.embeddings.weight"
    weights_mapper = _BACKBONE

    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return the layers, each a mixer."""
        expect_mixers(config, "state_size", "conv_kernel", "n_groups", "num_heads", "head_dim")
        expect_unlimited(config)
        eps = GivenSettings(config).epsilon("layer_norm_epsilon")
        layers = []
        for number in self.stage.layers:
            mixer = MambaMixer2(
                config.hidden_size,
                config.state_size,
                config.conv_kernel,
                int(config.expand * config.hidden_size),
                config.use_conv_bias,
                config.use_bias,
                config.n_groups,
                config.num_heads,
                config.head_dim,
                eps,
                config.hidden_act,
                quant_config=quant_config,
                prefix=f"{prefix}.{number}.mixer",
            )
            layers.append(HybridLayer(mixer, None, config.hidden_size, eps))
        return layers, eps


def expect_mixers(config: Any, *sizes: str) -> None:
    """Refuse a config that describes no mixers.

    Args:
        config: the config of the architecture.
        *sizes: names of settings that have to be sizes.

    Raises:
        ModelError: a setting is no size, or the activation is not SiLU.
    """
    given = GivenSettings(config)
    for name in sizes:
        given.size(name)
    if given("hidden_act") not in ("silu", "swish"):
        raise ModelError(
            f"{given.name}: hidden_act is {config.hidden_act!r:.40}, expected 'silu': mixers have "
            "no other"
        )


def expect_unlimited(config: Any) -> None:
    """Refuse a config with bounds of step sizes.

    Raises:
        ModelError: the config has such bounds.
    """
    limits = config.time_step_limit
    # JSON gives a list, and the default of transformers is a tuple.
    if limits not in ([0.0, math.inf], (0.0, math.inf)):
        raise ModelError(
            f"{type(config).__name__}: time_step_limit is {limits!r:.80}, and step sizes are not "
            "bounded here: run the model through transformers, by model.implementation"
        )
