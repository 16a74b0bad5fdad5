"""Decoders: attention, layers, the stack and the model. Families differ in data alone."""

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
from opgraft.ops.linear.lora.method import adapter_bounds
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
"""Merged layer → the layers of a checkpoint that the merged layer holds, one after another."""

_FITTED = (DynamicNTKScalingRotaryEmbedding, Phi3LongRoPEScaledRotaryEmbedding)
"""Ropes that rotate by other angles in a longer context."""


class DecoderAttention(nn.Module):
    """Attention of one layer with its projections, norms of query and key, and rope.

    Args:
        shape: the sizes of the decoder.
        family: the family of the decoder.
        layer: the number of the layer.
        rope: the rotary embedding. Layers may share one.
        quant_config: the quantization of the projections.
        prefix: the layer's path.

    Raises:
        LayerError: one norm covers all heads, and the ranks have different numbers of heads.
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
        head_size = shape.head_size
        self.qkv_proj = QKVParallelLinear(
            shape.hidden_size,
            head_size,
            shape.num_heads,
            shape.num_kv_heads,
            bias=shape.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        self.o_proj = self._output_projection(shape, family, quant_config, prefix)
        heads = self.qkv_proj.num_heads
        kv_heads = self.qkv_proj.num_kv_heads
        self.sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        self.head_size = head_size
        self.qk_norm = family.qk_norm
        if family.qk_norm:
            self.q_norm, self.k_norm = self._norms_of_heads(shape, family)
        self.rotary_emb = rope
        self.attn = Attention(
            heads,
            head_size,
            shape.attention_scale,
            kv_heads,
            shape.layers[layer].sliding_window,
            shape.attention_soft_cap,
            sinks_of_rank(self.qkv_proj.first_head, heads) if family.sinks else None,
            prefix=f"{prefix}.attn",
        )

    def _output_projection(
        self,
        shape: DecoderShape,
        family: DecoderFamily,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> RowParallelLinear:
        """Return the projection of the heads of this rank."""
        # Ranks have different numbers of heads if the ranks do not divide the key heads.
        shard = self.qkv_proj.uneven_output()
        if shard is not None and family.qk_norm == "whole":
            raise LayerError(
                f"{prefix}: its norm looks at all {shape.num_heads} heads at once, and "
                f"{self.qkv_proj.tp_size} tensor-parallel ranks have different numbers of heads: "
                f"choose a number of ranks that divides its {shape.num_kv_heads} key heads"
            )
        own: Any = {} if shard is None else {"shard": shard}
        return RowParallelLinear(
            shape.num_heads * shape.head_size,
            shape.hidden_size,
            bias=shape.output_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
            **own,
        )

    def _norms_of_heads(
        self, shape: DecoderShape, family: DecoderFamily
    ) -> tuple[nn.Module, nn.Module]:
        """Return the norms of query and key."""
        head_size = shape.head_size
        qkv = self.qkv_proj
        query_norm: nn.Module
        key_norm: nn.Module
        if family.qk_norm == "each":
            query_norm = HeadNorms(qkv.num_heads, head_size, shape.eps, qkv.first_head)
            key_norm = HeadNorms(qkv.num_kv_heads, head_size, shape.eps, qkv.first_kv_head)
            return query_norm, key_norm
        query_size = head_size
        key_size = head_size
        if family.qk_norm == "whole":
            # The heads of all ranks, as the mean square is over all of them.
            query_size *= shape.num_heads
            key_size *= shape.num_kv_heads
        norm = GemmaRMSNorm if family.gemma_norm else RMSNorm
        return norm(query_size, eps=shape.eps), norm(key_size, eps=shape.eps)

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
        """Normalise the heads in ``x`` ``[tokens, heads * head_size]``.

        Args:
            norm: the norm of each head, or of all heads at once.
            x: the heads of this rank.
            replicas: so many consecutive ranks have the same heads.
        """
        if self.qk_norm != "whole":
            heads = x.shape[-1] // self.head_size
            by_head: Tensor = norm(x.reshape(*x.shape[:-1], heads, self.head_size))
            return by_head.flatten(-2)
        ranks = get_tensor_model_parallel_world_size()
        # The split of query, key and value has left gaps between the rows of each.
        if ranks == 1:
            whole: Tensor = norm(x.contiguous())
            return whole
        # The mean square is that of the heads of all ranks, each head counted once.
        gathered = tensor_model_parallel_all_gather(x.contiguous())
        parts = gathered.chunk(ranks, dim=-1)[::replicas]
        normalised: Tensor = norm(torch.cat(parts, dim=-1))
        own_part = get_tensor_model_parallel_rank() // replicas
        return normalised.chunk(len(parts), dim=-1)[own_part]


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each between norms and added to the residual stream.

    The layer returns the output of the feed-forward layer and the residual stream separately. The
    next norm adds the two, so that one op adds and normalises.
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
        self.self_attn: nn.Module
        if shape.latent:
            self.self_attn = latent_attention(shape, shape.latent, rope, quant_config, path)
        else:
            self.self_attn = DecoderAttention(shape, family, layer, rope, quant_config, path)
        self.mlp: nn.Module = feed_forward(shape, family, layer, quant_config, f"{prefix}.mlp")
        norm = GemmaRMSNorm if family.gemma_norm else RMSNorm
        self.norms = (
            family.before_attention,
            family.after_attention,
            family.before_mlp,
            family.after_mlp,
        )
        for name in self.norms:
            if name:
                self.add_module(name, norm(shape.hidden_size, eps=shape.eps))
        self.residual_scale = shape.residual_scale

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the feed-forward layer, and the residual stream without that output.

        Args:
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            residual: ``[tokens, hidden_size]``, ``None`` before the first layer.
        """
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        hidden_states, residual = self._enter(before_attention, hidden_states, residual)
        attended = self.self_attn(positions, hidden_states)
        hidden_states = self._leave(after_attention, attended)
        hidden_states, residual = self._enter(before_mlp, hidden_states, residual)
        return self._leave(after_mlp, self.mlp(hidden_states)), residual

    def parts(self) -> DecoderParts | None:
        """Return the parts of the layer; ``None`` if the layer has other parts than Llama's."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        attention = self.self_attn
        mlp = self.mlp
        # A subclass may compute anything.
        if type(self) is not DecoderLayer or type(attention) is not DecoderAttention:
            return None
        if type(mlp) is not DecoderMLP:
            return None
        # A plan has no place for further norms and scales.
        if after_attention or after_mlp or attention.qk_norm or self.residual_scale != 1.0:
            return None
        if before_attention is None or before_mlp is None:
            return None
        # A plan keeps the table of the rope, and a fitted rope changes its table.
        if isinstance(attention.rotary_emb, _FITTED):
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
        # self.norms names modules that the constructor has added, so that none is missing.
        if residual is None:
            return norm(hidden_states), hidden_states  # type: ignore[misc]
        normalised: tuple[Tensor, Tensor] = norm(hidden_states, residual)  # type: ignore[misc]
        return normalised

    def _leave(self, name: str | None, hidden_states: Tensor) -> Tensor:
        if name is not None:
            hidden_states = self._modules[name](hidden_states)  # type: ignore[misc]
        if self.residual_scale == 1.0:
            return hidden_states
        return hidden_states * self.residual_scale


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
        # One rope for all layers of a kind: a table of sines for each layer would take memory.
        ropes = {name: rope_of(shape, parameters) for name, parameters in shape.ropes.items()}

        def make_embedding() -> nn.Module:
            return VocabParallelEmbedding(
                shape.vocab_size,
                shape.hidden_size,
                quant_config=quant_config,
                prefix=f"{prefix}.embed_tokens",
            )

        def make_layer(number: int) -> nn.Module:
            rope = ropes[shape.layers[number].rope]
            path = f"{prefix}.layers.{number}"
            return DecoderLayer(shape, family, number, rope, quant_config, path)

        def make_norm() -> nn.Module:
            norm = GemmaRMSNorm if family.gemma_norm else RMSNorm
            return norm(shape.hidden_size, eps=shape.eps)

        super().__init__(
            stage, embedding=make_embedding, tied=shape.tied, layer=make_layer, norm=make_norm
        )
        self.fitted_ropes = [rope for rope in ropes.values() if isinstance(rope, _FITTED)]
        self.max_position = shape.max_position
        self.plan = DecoderPlan()
        # transformers rounds the scale to the dtype of the weights, as in training.
        scale = torch.tensor(shape.embedding_scale, dtype=torch.get_default_dtype(), device="cpu")
        self.embedding_scale = float(scale)

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
        hidden_states, residual = self._scaled(input_ids, inputs_embeds)
        if self.fitted_ropes and positions.numel():
            self._fit_ropes(positions)
        planned = None
        # Most plans pass by the weight methods, which add the adapters.
        may_plan = self.plan.takes_adapters or adapter_bounds() is None
        if residual is None and may_plan:
            planned = self.plan.run(self.layers, positions, hidden_states)
        if planned is not None:
            hidden_states, residual = planned
        else:
            for layer in self.layers:
                hidden_states, residual = layer(positions, hidden_states, residual)
        # Each stage has a layer, so that there is a residual stream.
        return self.left(hidden_states, residual)  # type: ignore[arg-type]

    def planned(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor | None:
        """Return the result of ``forward`` if the plan computes all layers at once; else ``None``.

        The arguments are those of ``forward``.
        """
        hidden_states, residual = self._scaled(input_ids, inputs_embeds)
        if residual is not None:
            return None
        computed = self.plan.run(self.layers, positions, hidden_states)
        if computed is None:
            return None
        hidden_states, residual = computed
        # The caller goes past the compiled code, so nothing would fuse the native norm.
        return self.left(hidden_states, residual, compiled=False)

    def _scaled(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        hidden_states, residual = self.entered(input_ids, inputs_embeds)
        # With a residual stream, a stage before has scaled the embeddings.
        if self.embedding_scale != 1.0 and residual is None:
            hidden_states = hidden_states * self.embedding_scale
        return hidden_states, residual

    def _fit_ropes(self, positions: Tensor) -> None:
        """Fit ropes that depend on the length of the context to the contexts of this call.

        The batch may give a length for each token. Without a batch, the length is that of the
        sequence, as in transformers. Keys in a cache keep their rotation. Over a cache, the length
        is therefore the same for all tokens of a sequence: the longest that the batch allows, or
        the longest context of the model.
        """
        batch = current_batch()
        if batch is not None and batch.context_lens is not None:
            for rope in self.fitted_ropes:
                rope.fit_tokens(positions, batch.context_lens)
            return
        length = self.max_position
        if batch is None:
            length = int(positions.max()) + 1
        elif batch.max_context_len:
            length = batch.max_context_len
        for rope in self.fitted_ropes:
            rope.fit_context(length)


def rope_of(shape: DecoderShape, parameters: Mapping[str, Any]) -> Any:
    """Construct a rope for every position of the longest context.

    Args:
        shape: the sizes of the decoder.
        parameters: ``rope_parameters`` of the config.

    Raises:
        ModelError: the parameters describe no rope, or the rope has fewer positions.
    """
    # The alternative to halves are interleaved pairs: even elements with odd ones.
    halves = shape.latent is None or not shape.latent.interleaved
    try:
        rope = get_rope(
            shape.head_size,
            shape.max_position,
            halves,
            rope_parameters=parameters,
            model_positions=shape.model_positions,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the config describes a rope that cannot be made: {described(error)}"
        ) from error
    # A rope without a table computes any position.
    rows = len(getattr(rope, "cos_sin_cache", range(shape.max_position)))
    if rows < shape.max_position:
        raise ModelError(
            f"the rope of type {parameters.get('rope_type')!r} has {rows} positions, and the "
            f"longest context is {shape.max_position}: set model.max_model_len to at most {rows}"
        )
    return rope


class DecoderForCausalLM(StagedForCausalLM):
    """A decoder with logits. Each family is a subclass with a ``family`` of its own.

    Args:
        opgraft_config: the ``model`` section names the checkpoint with the architecture's config.
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
        self.stage = self.stage_of_rank(len(shape.layers), prefix)
        path = joined(prefix, "model")
        self.model = DecoderModel(shape, self.family, quant_config, path, self.stage)
        self.fitted_ropes = self.model.fitted_ropes
        self.lm_head = self.head(
            shape.vocab_size, shape.hidden_size, quant_config, prefix, tied=shape.tied
        )
        self.logits_processor = LogitsProcessor(
            shape.vocab_size, scale=shape.logits_scale, soft_cap=shape.logits_soft_cap
        )

    def planned(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor | None:
        """Return the result of ``forward`` if a ``DecoderPlan`` computes all layers in one call.

        ``None`` if the layers are to be called one after another.
        """
        # Asked first, as the ids would be looked up in vain.
        if self.model.plan.declines(self.model.layers, positions, self.dtype):
            return None
        return self.model.planned(input_ids, positions, inputs_embeds)
