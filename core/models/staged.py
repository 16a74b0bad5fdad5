"""Decoders in stages: the part of the stack on this rank, and the model around the stack."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from opgraft.models.description import joined
from opgraft.models.model import Model
from opgraft.models.stages import Stage, expect_given
from opgraft.ops.composites.composite import call_uncompiled
from opgraft.ops.embedding import LogitsProcessor, ParallelLMHead
from opgraft.ops.linear.quantization_config import QuantizationConfig
from torch import Tensor, nn


class DecoderStack(nn.Module):
    """The part of a decoder's embedding, layers and last norm that a stage has.

    A layer passes on the hidden states, ``[tokens, hidden_size]``, and the residual stream without
    these. A stage passes both on as one tensor ``[2, tokens, hidden_size]``.

    Args:
        stage: the stage of this rank.
        embedding: makes the embedding.
        tied: the head has the embedding's weight, so that the last stage needs the embedding, too.
        layer: makes the layer of a number.
        norm: makes the last norm.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        embedding: Callable[[], nn.Module],
        tied: bool,
        layer: Callable[[int], nn.Module],
        norm: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.stage = stage
        has_embedding = stage.is_first or (stage.is_last and tied)
        self.embed_tokens: Any = embedding() if has_embedding else None
        self.layers = nn.ModuleList()
        for number in stage.layers:
            # Checkpoints have the number in the whole model.
            self.layers.add_module(str(number), layer(number))
        self.norm: Any = norm() if stage.is_last else None

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of the parts on other stages."""
        # Loading would refuse the tensors of these parts as unexpected ones.
        parts = []
        for number in range(self.stage.num_layers):
            if number not in self.stage.layers:
                parts.append(f"layers.{number}")
        if self.embed_tokens is None:
            parts.append("embed_tokens")
        if self.norm is None:
            parts.append("norm")
        return parts

    def entered(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and the residual stream for the first layer.

        The first stage has no residual stream yet.

        Args:
            input_ids: ``[tokens]``; not read beside ``inputs_embeds``.
            inputs_embeds: embeddings ``[tokens, hidden_size]``; on a later stage, the output of the
                stage before.

        Raises:
            ModelError: a later stage has no ``inputs_embeds``.
        """
        if not self.stage.is_first:
            received = expect_given(self.stage, inputs_embeds)
            hidden_states, residual = received.unbind(0)
            return hidden_states, residual
        if inputs_embeds is None:
            return self.embed_tokens(input_ids), None
        return inputs_embeds, None

    def left(self, hidden_states: Tensor, residual: Tensor, compiled: bool = True) -> Tensor:
        """Return the output of this stage: on the last stage, the last norm of the sum.

        Other stages return ``[2, tokens, hidden_size]``: both tensors, for the next stage.

        Args:
            hidden_states: the output of the last layer, ``[tokens, hidden_size]``.
            residual: the residual stream without that output, ``[tokens, hidden_size]``.
            compiled: False calls the norm's own kernel, even if the op is left to a compiler.
        """
        # One tensor, so that stages send each other one message.
        if not self.stage.is_last:
            return torch.stack((hidden_states, residual))
        if compiled:
            outputs = self.norm(hidden_states, residual)
        else:
            outputs = call_uncompiled(self.norm, hidden_states, residual)
        return outputs[0]  # type: ignore[no-any-return]


class StagedForCausalLM(Model):
    """A stack with logits, cut into stages.

    Attributes:
        stage: the stage of this rank.
        model: the stack.
        lm_head: the head on the last stage; ``None`` on other stages.
    """

    stage_streams: ClassVar[int] = 2
    stage: Stage
    model: DecoderStack
    lm_head: Any
    logits_processor: LogitsProcessor

    def stage_of_rank(self, num_layers: int, prefix: str) -> Stage:
        """Return the stage of this rank in a model of ``num_layers`` layers."""
        # A tied head has the second name.
        heads = (joined(prefix, "lm_head.weight"), joined(prefix, "model.embed_tokens.weight"))
        return Stage.of(self, joined(prefix, "model.layers"), num_layers, heads)

    def head(
        self,
        vocab_size: int,
        hidden_size: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        tied: bool,
    ) -> nn.Module | None:
        """Make the head; ``None`` on stages before the last.

        A tied head has the embedding's weight, so that ``model`` must be set before.
        """
        if not self.stage.is_last:
            return None
        path = joined(prefix, "lm_head")
        made = ParallelLMHead(vocab_size, hidden_size, quant_config=quant_config, prefix=path)
        return made.tie_weights(self.model.embed_tokens) if tied else made

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of the parts on other stages. The stack has further parts."""
        return () if self.stage.is_last else ("lm_head",)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return hidden states ``[tokens, hidden_size]`` for ``compute_logits``.

        The tokens belong to the current ``AttentionBatch``, or to one sequence without a batch. A
        stage that is not the last returns the ``inputs_embeds`` of the next stage.
        """
        hidden_states: Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden_states

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits ``[rows, vocab_size]``, on the last stage only.

        ``None`` on ranks that do not gather the logits.
        """
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits
