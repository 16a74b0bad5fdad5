"""Dense decoders: one definition, of which families differ in data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from opgraft.base.text import described
from opgraft.config import OpgraftConfig
from opgraft.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from opgraft.errors import LayerError, ModelError
from opgraft.models.decoder_config import DecoderFamily, DecoderShape
from opgraft.models.decoder_experts import expert_sharing
from opgraft.models.decoder_mlp import DecoderMLP, feed_forward
from opgraft.models.description import architecture_config, joined, quantization_config
from opgraft.models.head_norms import HeadNorms
from opgraft.models.latent_attention import latent_attention
from opgraft.models.names import ShardId, WeightsMapper
from opgraft.models.sinks import sinks_of_rank
from opgraft.models.staged import DecoderStack, StagedForCausalLM
from opgraft.models.stages import Stage
from opgraft.ops.attention import Attention
from opgraft.ops.attention.batch import current_batch
from opgraft.ops.decoder_plan import DecoderParts, DecoderPlan
from opgraft.ops.embedding import LogitsProcessor, VocabParallelEmbedding
from opgraft.ops.layernorm import GemmaRMSNorm, RMSNorm
from opgraft.ops.linear import QKVParallelLinear, RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.rotary import (
    DynamicNTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    get_rope,
)
from torch import Tensor, nn

PACKED_MODULES: Mapping[str, Mapping[str, ShardId]] = MappingProxyType(
    {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }
)
"""Layers of a decoder, to those of a checkpoint that they hold one after another."""

_FITTED = (DynamicNTKScalingRotaryEmbedding, Phi3LongRoPEScaledRotaryEmbedding)
"""Ropes that rotate in another way in a longer context."""


class DecoderAttention(nn.Module):
    """Attention of one layer with its projections, norms of query and key, and rope.

    Args:
        shape: of the decoder.
        family: of the decoder.
        layer: number of the layer.
        rope: the rotary embedding, which layers may share.
        quant_config: the quantization of the projections.
        prefix: the layer's path.
    """

    def __init__(
        self,
        shape: DecoderShape,
        family: DecoderFamily,
        layer: int,
        rope: nn.Module,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            shape.hidden_size,
            shape.head_size,
            shape.num_heads,
            shape.num_kv_heads,
            bias=shape.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        shard = self.qkv_proj.uneven_output()
        if shard is not None and family.qk_norm == "whole":
            raise LayerError(
                f"{prefix}: its norm looks at all {shape.num_heads} heads at once, of which "
                f"{self.qkv_proj.tp_size} tensor-parallel ranks have different numbers: choose a number of ranks that "
                f"divides its {shape.num_kv_heads} key heads"
            )
        own: Any = {} if shard is None else {"shard": shard}
        self.o_proj = RowParallelLinear(
            shape.num_heads * shape.head_size,
            shape.hidden_size,
            bias=shape.output_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
            **own,
        )
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.sizes = [
            heads * shape.head_size,
            kv_heads * shape.head_size,
            kv_heads * shape.head_size,
        ]
        self.head_size = shape.head_size
        self.qk_norm = family.qk_norm
        if family.qk_norm == "each":
            self.q_norm: nn.Module = HeadNorms(
                heads, shape.head_size, shape.eps, self.qkv_proj.first_head
            )
            self.k_norm: nn.Module = HeadNorms(
                kv_heads, shape.head_size, shape.eps, self.qkv_proj.first_kv_head
            )
        elif family.qk_norm:
            norm = GemmaRMSNorm if family.gemma_norm else RMSNorm
            whole = family.qk_norm == "whole"
            self.q_norm = norm(
                shape.num_heads * shape.head_size if whole else shape.head_size, eps=shape.eps
            )
            self.k_norm = norm(
                shape.num_kv_heads * shape.head_size if whole else shape.head_size, eps=shape.eps
            )
        self.rotary_emb = rope
        self.attn = Attention(
            heads,
            shape.head_size,
            shape.attention_scale,
            kv_heads,
            shape.layers[layer].sliding_window,
            shape.attention_soft_cap,
            sinks_of_rank(self.qkv_proj.first_head, heads) if family.sinks else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Attend with ``hidden_states`` ``[tokens, hidden_size]`` at ``positions`` ``[tokens]``."""
        query, key, value = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        if self.qk_norm:
            query = self._normalised(self.q_norm, query)
            key = self._normalised(self.k_norm, key, self.qkv_proj.num_kv_head_replicas)
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output

    def _normalised(self, norm: nn.Module, x: Tensor, replicas: int = 1) -> Tensor:
        """Normalise heads, of which ``replicas`` ranks after one another have the same."""
        if self.qk_norm != "whole":
            heads: Tensor = norm(
                x.reshape(*x.shape[:-1], x.shape[-1] // self.head_size, self.head_size)
            )
            return heads.flatten(-2)
        size = get_tensor_model_parallel_world_size()
        if size == 1:
            whole: Tensor = norm(x.contiguous())
            return whole
        gathered = tensor_model_parallel_all_gather(x.contiguous())
        parts = gathered.chunk(size, dim=-1)[::replicas]
        normalised: Tensor = norm(torch.cat(parts, dim=-1))
        return normalised.chunk(len(parts), dim=-1)[get_tensor_model_parallel_rank() // replicas]


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each between norms and added to the residual stream.

    The residual stream and what is still to be added to it are kept apart, so that one op adds and normalises.
    """

    def __init__(
        self,
        shape: DecoderShape,
        family: DecoderFamily,
        layer: int,
        rope: nn.Module,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        path = f"{prefix}.self_attn"
        self.self_attn: nn.Module = (
            latent_attention(shape, shape.latent, rope, quant_config, path)
            if shape.latent
            else DecoderAttention(shape, family, layer, rope, quant_config, path)
        )
        self.mlp: nn.Module = feed_forward(shape, family, layer, quant_config, f"{prefix}.mlp")
        norm = GemmaRMSNorm if family.gemma_norm else RMSNorm
        self.norms = (
            family.before_attention,
            family.after_attention,
            family.before_mlp,
            family.after_mlp,
        )
        for name in filter(None, self.norms):
            self.add_module(name, norm(shape.hidden_size, eps=shape.eps))
        self.residual_scale = shape.residual_scale

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the feed-forward layer and the residual stream that it is still to be added to.

        Args:
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            residual: the same, ``None`` before the first layer.
        """
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        hidden_states, residual = self._enter(before_attention, hidden_states, residual)
        hidden_states = self._leave(after_attention, self.self_attn(positions, hidden_states))
        hidden_states, residual = self._enter(before_mlp, hidden_states, residual)
        return self._leave(after_mlp, self.mlp(hidden_states)), residual

    def parts(self) -> DecoderParts | None:
        """Return the parts of the layer, where there are no others."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        attention, mlp = self.self_attn, self.mlp
        if (
            type(self) is not DecoderLayer
            or type(attention) is not DecoderAttention
            or type(mlp) is not DecoderMLP
        ):
            return None
        if after_attention or after_mlp or attention.qk_norm or self.residual_scale != 1.0:
            return None
        if (
            before_attention is None
            or before_mlp is None
            or isinstance(attention.rotary_emb, _FITTED)
        ):
            return None
        return DecoderParts(
            before_attention=self._modules[before_attention],
            qkv_proj=attention.qkv_proj,
            rotary_emb=attention.rotary_emb,
            attn=attention.attn,
            o_proj=attention.o_proj,
            before_mlp=self._modules[before_mlp],
            gate_up_proj=mlp.gate_up_proj,
            act_fn=mlp.act_fn,
            down_proj=mlp.down_proj,
        )

    def _enter(
        self, name: str | None, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if name is None:
            total = hidden_states if residual is None else hidden_states + residual
            return total, total
        norm = self._modules[name]
        if residual is None:
            return norm(hidden_states), hidden_states  # type: ignore[misc]  # a name of ours is there
        normalised: tuple[Tensor, Tensor] = norm(hidden_states, residual)  # type: ignore[misc]
        return normalised

    def _leave(self, name: str | None, hidden_states: Tensor) -> Tensor:
        if name is not None:
            hidden_states = self._modules[name](hidden_states)  # type: ignore[misc]
        return hidden_states if self.residual_scale == 1.0 else hidden_states * self.residual_scale


class DecoderModel(DecoderStack):
    """The stack of a decoder: token ids to hidden states."""

    def __init__(
        self,
        shape: DecoderShape,
        family: DecoderFamily,
        quant_config: QuantizationConfig | None,
        prefix: str,
        stage: Stage,
    ) -> None:
        ropes = {name: rope_of(shape, parameters) for name, parameters in shape.ropes.items()}
        sizes, rope = (
            (shape.vocab_size, shape.hidden_size),
            [ropes[layer.rope] for layer in shape.layers],
        )
        super().__init__(
            stage,
            embedding=lambda: VocabParallelEmbedding(
                *sizes, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
            ),
            tied=shape.tied,
            layer=lambda number: DecoderLayer(
                shape, family, number, rope[number], quant_config, f"{prefix}.layers.{number}"
            ),
            norm=lambda: (GemmaRMSNorm if family.gemma_norm else RMSNorm)(
                shape.hidden_size, eps=shape.eps
            ),
        )
        self.fitted_ropes = [rope for rope in ropes.values() if isinstance(rope, _FITTED)]
        self.max_position = shape.max_position
        self.plan = DecoderPlan()
        # transformers keeps the scale in the dtype of the weights, and so it was in training
        self.embedding_scale = float(
            torch.tensor(shape.embedding_scale, dtype=torch.get_default_dtype(), device="cpu")
        )

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states ``[tokens, hidden_size]`` after the last norm, or what the next stage is given.

        Args:
            input_ids: ``[tokens]``; not read beside ``inputs_embeds``.
            positions: ``[tokens]``, of each token in its sequence.
            inputs_embeds: as of ``DecoderStack.entered``.
        """
        hidden_states, residual = self._scaled(input_ids, inputs_embeds)
        if self.fitted_ropes and positions.numel():
            self._fit_ropes(positions)
        planned = self.plan.run(self.layers, positions, hidden_states) if residual is None else None
        if planned is not None:
            hidden_states, residual = planned
        else:
            for layer in self.layers:
                hidden_states, residual = layer(positions, hidden_states, residual)
        return self.left(hidden_states, residual)  # type: ignore[arg-type]  # there is a layer

    def planned(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor | None:
        """Return what a call does, where the plan computes all layers in one; ``None`` where it does not."""
        hidden_states, residual = self._scaled(input_ids, inputs_embeds)
        computed = (
            self.plan.run(self.layers, positions, hidden_states) if residual is None else None
        )
        return None if computed is None else self.left(computed[0], computed[1], compiled=False)

    def _scaled(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        hidden_states, residual = self.entered(input_ids, inputs_embeds)
        if self.embedding_scale != 1.0 and residual is None:
            hidden_states = hidden_states * self.embedding_scale
        return hidden_states, residual

    def _fit_ropes(self, positions: Tensor) -> None:
        """Have ropes that depend on the length of the context rotate for that of this call.

        The batch may say it for each token. Without a cache it is the length of the sequence, as in transformers. Keys
        in a cache stay rotated as they were, so over a cache it is the same from the first token of a sequence to its
        last: what the batch says that one may come to have, or the longest context.
        """
        batch = current_batch()
        if batch is not None and batch.context_lens is not None:
            for rope in self.fitted_ropes:
                rope.fit_tokens(positions, batch.context_lens)
            return
        length = (
            int(positions.max()) + 1
            if batch is None
            else batch.max_context_len or self.max_position
        )
        for rope in self.fitted_ropes:
            rope.fit_context(length)


def rope_of(shape: DecoderShape, parameters: Mapping[str, Any]) -> Any:
    """Construct a rope whose table has a row for each position of the longest context.

    Raises:
        ModelError: its parameters are none, or its table is shorter.
    """
    sizes = (shape.head_size, shape.max_position)
    halves = shape.latent is None or not shape.latent.interleaved
    try:
        rope = get_rope(
            *sizes, halves, rope_parameters=parameters, model_positions=shape.model_positions
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the config describes a rope that cannot be made: {described(error)}"
        ) from error
    rows = len(getattr(rope, "cos_sin_cache", range(shape.max_position)))
    if rows < shape.max_position:
        raise ModelError(
            f"the rope of type {parameters.get('rope_type')!r} has {rows} positions, and the longest context is "
            f"{shape.max_position}: set model.max_model_len to at most {rows}"
        )
    return rope


class DecoderForCausalLM(StagedForCausalLM):
    """A decoder with its logits; a family is a subclass that sets ``family``.

    Args:
        opgraft_config: its ``model`` section names the checkpoint, which has the architecture's config.
        prefix: the path of this model in a larger one.

    Raises:
        ModelError: the config does not describe a decoder of this family.
    """

    model: DecoderModel
    family: ClassVar[DecoderFamily] = DecoderFamily()
    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = PACKED_MODULES
    embedding_weight: ClassVar[str] = "model.embed_tokens.weight"
    plain_config: ClassVar[bool] = True
    weights_mapper = WeightsMapper(base="model")

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        quant_config = quantization_config(opgraft_config, self)
        config: Any = self.config or architecture_config(opgraft_config)
        shape = DecoderShape.of(config, self.family, opgraft_config.model.max_model_len)
        shape = dataclasses.replace(shape, sharing=expert_sharing(opgraft_config))
        self.max_position = shape.max_position
        path, sizes = joined(prefix, "model"), (shape.vocab_size, shape.hidden_size)
        self.stage = self.stage_of_rank(len(shape.layers), prefix)
        self.model = DecoderModel(shape, self.family, quant_config, path, self.stage)
        self.fitted_ropes = self.model.fitted_ropes
        self.lm_head = self.head(*sizes, quant_config, prefix, tied=shape.tied)
        self.logits_processor = LogitsProcessor(
            shape.vocab_size, scale=shape.logits_scale, soft_cap=shape.logits_soft_cap
        )

    def planned(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor | None:
        """Return what ``forward`` does, where a ``DecoderPlan`` computes all layers in one call; else ``None``."""
        # Else ids would be looked up in vain.
        if self.model.plan.declines(self.model.layers, positions, self.dtype):
            return None
        return self.model.planned(input_ids, positions, inputs_embeds)
