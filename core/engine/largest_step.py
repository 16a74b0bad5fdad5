"""The step that takes the most memory, for measuring it before there are requests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count, islice

from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, Scheduled, Step
from opgraft.ops.attention import Attention
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.fused_moe import FusedMoE
from opgraft.ops.latent_attention import MLAAttention
from opgraft.ops.linear import LinearBase
from torch import nn

_FLOAT32 = 4
_COPIES = 4
"""Of what a layer computes: its dtype and float32, each before and after an operation."""

_SORTED = 10
"""Numbers for each logit of sampling: the logits, sorted ones with int64 indices, probabilities and their sums."""

_LAYER = re.compile(r".*?\.\d+(?=\.|$)")
"""The part of a path up to the number of the layer."""

_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, max_tokens=1, seed=0, logprobs=1, prompt_logprobs=1
)
"""Of requests that take the most memory: tokens drawn from a part of the vocabulary, log-probabilities of all."""


def largest_step(
    max_num_seqs: int, max_num_tokens: int, longest: int, block_size: int, kinds: int
) -> Step:
    """Return a step of as many sequences, and as many tokens, as a step may have, each sampling a token.

    The first sequences are as long as they may be, since attention over one takes most then.

    Args:
        max_num_seqs: sequences of a step, at most.
        max_num_tokens: tokens of a step, at most.
        longest: tokens of the longest context.
        block_size: tokens in a block.
        kinds: tables of a sequence.
    """
    free_blocks, left = count(), max_num_tokens
    added, sequences = [], []
    for number in range(min(max_num_seqs, max_num_tokens)):
        others = min(max_num_seqs, max_num_tokens) - number - 1
        length = min(longest, left - others)
        left -= length
        needed = -(-length // block_size)
        blocks = tuple(tuple(islice(free_blocks, needed)) for _ in range(kinds))
        name = f"largest step {number}"
        added.append(
            NewSequence(name, (0,) * length, length, length, _PARAMS, blocks, number, state=number)
        )
        sequences.append(Scheduled(name, 0, length, ((),) * kinds, True))
    return Step((), tuple(added), (), tuple(sequences))


@dataclass
class _Widths:
    """Numbers of elements by which a step's memory is bounded.

    Attributes:
        layers: of each layer, the inputs and outputs of all its matrices for a token.
        matrix: of the largest matrix, or of all experts of a layer.
        heads: query heads of a layer, at most.
        vocabulary: tokens of the vocabulary.
    """

    layers: dict[str, int] = field(default_factory=dict)
    matrix: int = 0
    heads: int = 0
    vocabulary: int = 0

    def add(self, path: str, width: int, matrix: int) -> None:
        """Count matrices of the layer that the module under a path belongs to."""
        numbered = _LAYER.match(path)
        layer = path if numbered is None else numbered[0]
        known = self.layers.get(layer, 0)
        self.layers[layer] = known + width
        self.matrix = max(self.matrix, matrix)


def step_bound(model: nn.Module, tokens: int, rows: int, longest: int) -> int | None:
    """Return more bytes than a step takes beside weights and cache, or ``None`` for layers that are not known.

    Everything counts as float32. A layer keeps the inputs and outputs of all its matrices four times. Attention keeps
    the scores of all heads over all tokens of the step twice. One matrix is rebuilt from codes. Sampling sorts the
    logits of its rows.

    Args:
        model: a decoder.
        tokens: of the step.
        rows: of logits that are in memory at a time.
        longest: tokens of the longest context.
    """
    widths = _Widths()
    for path, module in model.named_modules():
        if not _count(widths, path, module):
            return None

    widest = max(widths.layers.values(), default=0)
    kept = tokens * widest * _COPIES
    scores = widths.heads * tokens * min(tokens, longest) * 2
    logits = rows * widths.vocabulary * _SORTED
    return _FLOAT32 * (kept + scores + widths.matrix + logits)


def _count(widths: _Widths, path: str, module: nn.Module) -> bool:
    """Add a module to the widths, and return False if its memory is not known."""
    if isinstance(module, LinearBase):
        inputs, outputs = module.input_size, module.output_size
        widths.add(path, inputs + outputs, inputs * outputs)
    elif isinstance(module, FusedMoE):
        _count_experts(widths, path, module)
        return module.exchange is None  # with an exchange, tokens of other ranks come as well
    elif isinstance(module, VocabParallelEmbedding):
        widths.vocabulary = max(widths.vocabulary, module.num_embeddings)
    elif isinstance(module, (Attention, MLAAttention)):
        widths.heads = max(widths.heads, module.num_heads)
    else:
        return not isinstance(module, CachedAttention)
    return True


def _count_experts(widths: _Widths, path: str, layer: FusedMoE) -> None:
    shape = layer.moe_config
    inner, outer = shape.intermediate_size_per_partition, shape.hidden_dim
    visited = layer.top_k * (3 * inner + 2 * outer)
    widths.add(path, visited, layer.num_experts * 3 * inner * outer)
