"""Decoders that are cut into stages: the stack of layers as far as a rank has it, and the model around it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
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
    """Embedding, layers and last norm of a decoder, of which a stage has its own.

    Between layers go the hidden states, ``[tokens, hidden_size]``, and the residual stream that they are still to be
    added to; between stages both as one tensor ``[2, tokens, hidden_size]``.

    Args:
        stage: of this rank.
        embedding: makes the embedding; the last stage has it too where its weight is the head's.
        tied: whether that is so.
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
        self.embed_tokens: Any = embedding() if stage.is_first or (stage.is_last and tied) else None
        self.layers = nn.ModuleList()
        for number in stage.layers:
            # By its number in the whole, as in checkpoints.
            self.layers.add_module(str(number), layer(number))
        self.norm: Any = norm() if stage.is_last else None

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of the parts that other stages have."""
        parts = [
            f"layers.{number}"
            for number in range(self.stage.num_layers)
            if number not in self.stage.layers
        ]
        return parts + [name for name in ("embed_tokens", "norm") if getattr(self, name) is None]

    def entered(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and the residual stream, if there is one, that the first layer is called with.

        Args:
            input_ids: ``[tokens]``; not read beside ``inputs_embeds``.
            inputs_embeds: embeddings ``[tokens, hidden_size]``; on a later stage what the one before has returned.

        Raises:
            ModelError: a later stage is given none.
        """
        if not self.stage.is_first:
            hidden_states, residual = expect_given(self.stage, inputs_embeds).unbind(0)
            return hidden_states, residual
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds, None

    def left(self, hidden_states: Tensor, residual: Tensor, compiled: bool = True) -> Tensor:
        """Return what comes of the last layer's outputs: the last norm of their sum, or both for the next stage.

        Args:
            hidden_states: of the layer.
            residual: to which they are still to be added.
            compiled: whether this is in the graph of a model that a compiler has; else its norm has a kernel there too.
        """
        if not self.stage.is_last:
            return torch.stack((hidden_states, residual))
        outputs = (self.norm if compiled else partial(call_uncompiled, self.norm))(
            hidden_states, residual
        )
        return outputs[0]  # type: ignore[no-any-return]


class StagedForCausalLM(Model):
    """A stack with its logits, cut into stages.

    Attributes:
        stage: of this rank.
        model: the stack.
        lm_head: the head, which the last stage has.
    """

    stage_streams: ClassVar[int] = 2
    stage: Stage
    model: DecoderStack
    lm_head: Any
    logits_processor: LogitsProcessor

    def stage_of_rank(self, num_layers: int, prefix: str) -> Stage:
        """Return the stage of this rank, of so many layers below ``model``."""
        heads = joined(prefix, "lm_head.weight"), joined(prefix, "model.embed_tokens.weight")
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
        """Make the head of the stack, whose embedding has its weight where they are tied; ``None`` on other stages."""
        if not self.stage.is_last:
            return None
        made = ParallelLMHead(
            vocab_size, hidden_size, quant_config=quant_config, prefix=joined(prefix, "lm_head")
        )
        return made.tie_weights(self.model.embed_tokens) if tied else made

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of the parts that other stages have, save those of the stack."""
        return () if self.stage.is_last else ("lm_head",)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return hidden states ``[tokens, hidden_size]``, of which ``compute_logits`` makes logits.

        The tokens are those of the current ``AttentionBatch``, or of one sequence where there is none. A stage that is
        not the last returns what the next one is given as ``inputs_embeds``.
        """
        hidden_states: Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden_states

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits ``[rows, vocab_size]`` of hidden states; ``None`` on ranks that do not gather them.

        Only the last stage computes them.
        """
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits
