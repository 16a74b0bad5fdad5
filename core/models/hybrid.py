"""Decoders whose layers mix tokens by a state, beside such as attend: one definition of the stack for all of them."""

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
    """One layer: a mixer and, as a rule, a feed-forward layer, each behind a norm and added to the residual stream.

    Args:
        mixer: attention, or one that carries a state.
        mlp: the feed-forward layer, if there is one.
        hidden_size: of the stream.
        eps: of the norms.
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
        """Return the output of the last part, and the residual stream that it is still to be added to.

        Args:
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            residual: the same, ``None`` before the first layer.
        """
        hidden_states, residual = normalised(self.mixer_norm, hidden_states, residual)
        mixed = self.mixed(positions, hidden_states)
        if self.mlp is None:
            return mixed, residual
        hidden_states, residual = normalised(self.mlp_norm, mixed, residual)
        return self.mlp(hidden_states), residual

    def mixed(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return what the mixer makes of ``[tokens, hidden_size]``, however it is called."""
        if isinstance(self.mixer, DecoderAttention):
            return self.mixer(positions, hidden_states)  # type: ignore[no-any-return]
        if isinstance(self.mixer, MambaMixer2):
            return self.mixer(hidden_states)  # type: ignore[no-any-return]
        mixed = torch.empty_like(hidden_states)
        self.mixer(hidden_states, mixed)
        return mixed


def normalised(
    norm: nn.Module, hidden_states: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``[tokens, hidden_size]`` added to the residual stream, if there is one, and the stream."""
    if residual is None:
        return norm(hidden_states), hidden_states
    both: tuple[Tensor, Tensor] = norm(hidden_states, residual)
    return both


class HybridModel(DecoderStack):
    """The stack: token ids to hidden states."""

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states ``[tokens, hidden_size]`` after the last norm, or what the next stage is given.

        Args:
            input_ids: ``[tokens]``; not read beside ``inputs_embeds``.
            positions: ``[tokens]``, of each token in its sequence.
            inputs_embeds: as of ``DecoderStack.entered``.
        """
        hidden_states, residual = self.entered(input_ids, inputs_embeds)
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.left(hidden_states, residual)  # type: ignore[arg-type]  # there is a layer


class HybridForCausalLM(StagedForCausalLM, ABC):
    """A stack with its logits; a family is a subclass that makes the layers.

    Args:
        opgraft_config: its ``model`` section names the checkpoint, which has the architecture's config.
        prefix: the path of this model in a larger one.

    Raises:
        ModelError: the config does not describe a model of this family.
    """

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        quant_config = quantization_config(opgraft_config, self)
        config: Any = self.config or architecture_config(opgraft_config)
        path, sizes = joined(prefix, "model"), (config.vocab_size, config.hidden_size)
        self.stage = self.stage_of_rank(config.num_hidden_layers, prefix)
        layers, eps = self.make_layers(config, quant_config, f"{path}.layers")
        made = iter(layers)
        self.model = HybridModel(
            self.stage,
            embedding=lambda: VocabParallelEmbedding(
                *sizes, quant_config=quant_config, prefix=f"{path}.embed_tokens"
            ),
            tied=config.tie_word_embeddings,
            layer=lambda number: next(made),
            norm=lambda: RMSNorm(config.hidden_size, eps=eps),
        )
        self.lm_head = self.head(*sizes, quant_config, prefix, tied=config.tie_word_embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @abstractmethod
    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return the layers of ``stage`` and the ``eps`` of the last norm.

        Args:
            config: of the architecture.
            quant_config: the quantization of the layers.
            prefix: their path.
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
        kinds = ["full_attention" if kind == "conv" else kind for kind in config.layer_types]
        others = {
            "rms_norm_eps": config.norm_eps,
            "hidden_act": "silu",
            "layer_types": kinds,
            "intermediate_size": _adjusted(config),
        }
        family = DecoderFamily(qk_norm="head", qkv_bias=False, output_bias=False)
        shape = DecoderShape.of(config, family, self.opgraft_config.model.max_model_len, **others)
        self.max_position = shape.max_position
        ropes = {name: rope_of(shape, parameters) for name, parameters in shape.ropes.items()}
        layers = []
        for number in self.stage.layers:
            path = f"{prefix}.{number}"
            if config.layer_types[number] == "conv":
                conv = ShortConv(
                    config, config.hidden_size, number, None, None, quant_config, f"{path}.conv"
                )
                mixer: nn.Module = conv
            else:
                rope = ropes[shape.layers[number].rope]
                mixer = DecoderAttention(
                    shape, family, number, rope, quant_config, f"{path}.self_attn"
                )
            mlp = DecoderMLP(shape, quant_config, f"{path}.feed_forward")
            layers.append(HybridLayer(mixer, mlp, shape.hidden_size, shape.eps))
        return layers, shape.eps


def _adjusted(config: Any) -> int:
    """Return the size of LFM2's feed-forward layers, which its config says indirectly."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    size = int(config.block_ffn_dim_multiplier * size)
    multiple = GivenSettings(config).size("block_multiple_of")
    return -(-size // multiple) * multiple


_BACKBONE = WeightsMapper(
    prefixes={"backbone.embedding.": "model.embed_tokens.", "backbone.": "model."},
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
"""Names of checkpoints of Mamba and Mamba-2."""


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

    Raises:
        ModelError: one of the named sizes is none, or the activation is another than they have.
    """
    given = GivenSettings(config)
    for name in sizes:
        given.size(name)
    if given("hidden_act") not in ("silu", "swish"):
        raise ModelError(
            f"{given.name}: hidden_act is {config.hidden_act!r:.40}, expected 'silu': mixers have no other"
        )


def expect_unlimited(config: Any) -> None:
    """Refuse a config that bounds step sizes.

    Raises:
        ModelError: it does.
    """
    limits = config.time_step_limit
    if limits not in ([0.0, math.inf], (0.0, math.inf)):
        raise ModelError(
            f"{type(config).__name__}: time_step_limit is {limits!r:.80}, and step sizes are not bounded here: run the "
            "model through transformers, by model.implementation"
        )
