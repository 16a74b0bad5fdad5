"""Logits from hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.distributed import get_tp_group
from opgraft.errors import LayerError
from opgraft.ops.embedding.vocab import VocabParallelEmbedding
from torch import Tensor

__all__ = ["LogitsProcessor"]


@CustomOp.register("logits_processor")
class LogitsProcessor(PluggableLayer):
    """``scale · soft_cap · tanh(hidden · weightᵀ / soft_cap)`` of all ranks, then more functions.

    Shapes:
        ``[..., embedding_dim]`` to ``[..., org_vocab_size]``.

    Args:
        vocab_size: number of ids, with added ones.
        org_vocab_size: number of ids to return logits for; all ids if not given.
        scale: multiplies the logits.
        logits_as_input: the caller gives logits instead of hidden states.
        soft_cap: bound of the logits before ``scale`` (Gemma Team, arXiv:2408.00118); none if not
            given.

    Attributes:
        logits_processors: functions of logits, applied at the end, one after another.
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        self.scale = scale
        self.logits_as_input = logits_as_input
        self.soft_cap = soft_cap
        self.logits_processors: Sequence[Callable[[Tensor], Tensor]] = ()

    def forward(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: Tensor,
        embedding_bias: Tensor | None = None,
    ) -> Tensor | None:
        """Compute logits.

        Args:
            lm_head: has the weight. May be the model's embedding.
            hidden_states: ``[..., embedding_dim]``, or logits.
            embedding_bias: this rank's part; the bias of ``lm_head`` if not given.

        Returns:
            The logits. ``None`` on other ranks than the first, if the communicator gathers on one
            rank only.

        Raises:
            LayerError: ``lm_head`` has fewer ids than ``org_vocab_size``.
        """
        logits: Tensor | None = hidden_states
        if not self.logits_as_input:
            logits = self._get_logits(hidden_states, lm_head, embedding_bias)
        if logits is None:
            return None

        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        # A product with 1 costs a pass over the logits.
        if self.scale != 1.0:
            logits = logits * self.scale
        for process in self.logits_processors:
            logits = process(logits)
        return logits

    def _get_logits(
        self, hidden_states: Tensor, lm_head: VocabParallelEmbedding, embedding_bias: Tensor | None
    ) -> Tensor | None:
        if self.org_vocab_size > lm_head.num_embeddings:
            raise LayerError(
                f"LogitsProcessor: logits of {self.org_vocab_size} ids are wanted, and "
                f"{lm_head.name} has {lm_head.num_embeddings}: construct both with one vocab_size"
            )

        bias = lm_head.bias if embedding_bias is None else embedding_bias
        product: Tensor = lm_head.quant_method.apply(lm_head, hidden_states, bias)
        # A layer that is whole on every rank has nothing to gather.
        gathers = lm_head.tp_size > 1 or get_tp_group().world_size == 1
        logits = self._gather_logits(product) if gathers else product
        if logits is None:
            return None

        # The columns of added ids stand behind the model's own of each rank, so between ranks.
        is_scattered = lm_head.tp_size > 1 or self.org_vocab_size > lm_head.org_vocab_size
        if lm_head.num_added_embeddings and is_scattered:
            columns = lm_head.vocabulary.full_mapping()[: self.org_vocab_size]
            return logits[..., torch.tensor(columns, device=logits.device)]
        return logits[..., : self.org_vocab_size]

    def _gather_logits(self, logits: Tensor) -> Tensor | None:
        """Return the logits of all ranks. As in vLLM, one rank calls this method too."""
        group = get_tp_group()
        if group.communicator is None:
            return logits
        if group.communicator.use_all_gather:
            return group.all_gather(logits)
        return group.gather(logits)

    def extra_repr(self) -> str:
        sizes = f"{self.vocab_size}, {self.org_vocab_size}"
        return f"{sizes}, scale={self.scale}, soft_cap={self.soft_cap}"
