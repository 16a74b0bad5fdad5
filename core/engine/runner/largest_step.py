"""The step with the most memory, to measure its memory before there are requests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count, islice

from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step
from opgraft.ops.attention import Attention
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.attention.latent import MLAAttention
from opgraft.ops.attention.paged import GATHERED_AT_ONCE
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.linear import LinearBase
from opgraft.ops.linear.methods import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from opgraft.ops.moe.fused import FusedMoE, UnquantizedFusedMoEMethod
from torch import nn

_FLOAT32 = 4
_COPIES = 4
"""Copies of inputs and outputs: in the dtype and in float32, before and after an operation."""

_SCORES = 4
"""Numbers for each score: before and after the cap, shares, and the mask."""

_GATHERED = 4
"""Copies of keys and values: stored ones, in float32, before and after the mask."""

_REPEATED = 2
"""Copies of keys and values of all query heads: before and after scaling."""

_REBUILT = 4
"""Numbers for each code of a matrix: unpacked, less the offset, scaled, and as the layer needs."""

_SORTED = 10
"""Numbers for each logit of sampling: logits, sorted logits with int64 indices, and probabilities.

Probabilities count with their sums.
"""

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_LAYER = re.compile(r".*?\.\d+(?=\.|$)")
"""The part of a path up to the number of the layer."""

_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, max_tokens=1, seed=0, logprobs=1, prompt_logprobs=1
)
"""Settings with the most memory: drawing from a part of the vocabulary, and log-probabilities."""


def largest_step(
    max_num_seqs: int, max_num_tokens: int, longest: int, block_size: int, kinds: int
) -> Step:
    """Return a step with the most sequences and the most tokens. Each sequence samples a token.

    The first sequences are as long as possible, because their attention takes the most memory.

    Args:
        max_num_seqs: sequences of a step, at most.
        max_num_tokens: tokens of a step, at most.
        longest: tokens of the longest context.
        block_size: tokens in a block.
        kinds: tables of a sequence.
    """
    free_blocks = count()
    left = max_num_tokens
    added = []
    sequences = []
    num_seqs = min(max_num_seqs, max_num_tokens)
    for number in range(num_seqs):
        # A token for each of the others.
        others = num_seqs - number - 1
        length = min(longest, left - others)
        left -= length
        needed = -(-length // block_size)
        blocks = tuple(tuple(islice(free_blocks, needed)) for _ in range(kinds))
        name = f"largest step {number}"
        tokens = (0,) * length
        added.append(
            NewSequence(name, tokens, length, length, _PARAMS, blocks, number, state=number)
        )
        sequences.append(ScheduledPart(name, 0, length, ((),) * kinds, True))
    return Step((), tuple(added), (), tuple(sequences))


@dataclass
class _Widths:
    """Numbers of elements for a bound on the memory of a step.

    Attributes:
        layers: for each layer, inputs and outputs of all matrices for one token.
        matrix: elements of the largest matrix, or of all experts of a layer, with the copies of a
            quantized matrix.
        heads: query heads of a layer, at most.
        context: elements made of the keys and values of one token of a context, at most.
        vocabulary: tokens of the vocabulary.
    """

    layers: dict[str, int] = field(default_factory=dict)
    matrix: int = 0
    heads: int = 0
    context: int = 0
    vocabulary: int = 0

    def add(self, path: str, width: int, matrix: int) -> None:
        """Count matrices of the layer around the module at a path."""
        numbered = _LAYER.match(path)
        layer = path if numbered is None else numbered[0]
        known = self.layers.get(layer, 0)
        self.layers[layer] = known + width
        self.matrix = max(self.matrix, matrix)


def step_bound(
    model: nn.Module, tokens: int, rows: int, longest: int, sequences: int
) -> int | None:
    """Return an upper bound on the bytes of a step, beside weights and cache.

    Returns ``None`` for a model with unknown layers.

    Everything counts as float32. A layer keeps inputs and outputs of all its matrices four times.
    Each token of the step may see a context of ``longest`` tokens, most of them in the cache.
    Attention keeps the scores of all heads, and gathers the keys and values of some contexts at a
    time. One matrix is rebuilt from codes. Sampling sorts the logits of its rows.

    Args:
        model: a decoder.
        tokens: of the step.
        rows: of logits in memory at a time.
        longest: tokens of the longest context.
        sequences: of the step, at most.
    """
    widths = _Widths()
    for path, module in model.named_modules():
        if not _count(widths, path, module):
            return None

    widest = max(widths.layers.values(), default=0)
    kept = tokens * widest * _COPIES
    scores = widths.heads * tokens * longest * _SCORES
    gathered = max(longest, min(sequences * longest, GATHERED_AT_ONCE)) * widths.context
    logits = rows * widths.vocabulary * _SORTED
    return _FLOAT32 * (kept + scores + gathered + widths.matrix + logits)


def logits_bound(rows: int, vocabulary: int) -> int:
    """Return an upper bound on the bytes of rows of logits, with the copies of their operation."""
    return rows * vocabulary * _FLOAT32 * _COPIES


def _count(widths: _Widths, path: str, module: nn.Module) -> bool:
    """Add a module to the widths, and return False if its memory is not known."""
    if isinstance(module, LinearBase):
        inputs, outputs = module.input_size, module.output_size
        widths.add(path, inputs + outputs, inputs * outputs * _copies(module))
    elif isinstance(module, FusedMoE):
        _count_experts(widths, path, module)
        # With an exchange, an unknown number of tokens of other ranks come as well.
        return module.exchange is None
    elif isinstance(module, VocabParallelEmbedding):
        widths.vocabulary = max(widths.vocabulary, module.num_embeddings)
        matrix = module.num_embeddings_padded * module.embedding_dim
        if _copies(module) == _REBUILT:
            widths.matrix = max(widths.matrix, matrix * _REBUILT)
    elif isinstance(module, (Attention, MLAAttention)):
        widths.heads = max(widths.heads, module.num_heads)
        widths.context = max(widths.context, _of_context(module))
    else:
        return not isinstance(module, CachedAttention)
    return True


def _count_experts(widths: _Widths, path: str, layer: FusedMoE) -> None:
    shape = layer.moe_config
    inner = shape.intermediate_size_per_partition
    outer = shape.hidden_dim
    visited = layer.top_k * (3 * inner + 2 * outer)
    matrices = layer.num_experts * 3 * inner * outer
    widths.add(path, visited, matrices * _copies(layer))


def _copies(layer: nn.Module) -> int:
    """Return the most numbers for each weight of a matrix while a layer computes."""
    return 1 if isinstance(getattr(layer, "quant_method", None), _PLAIN) else _REBUILT


def _of_context(layer: Attention | MLAAttention) -> int:
    """Return the number of elements that a layer makes of one token of a context."""
    if isinstance(layer, MLAAttention):
        stored, key, value = layer.head_size, layer.qk_head_dim, layer.v_head_dim
        repeated = layer.num_heads * (layer.qk_nope_head_dim + key + value)
    else:
        stored = 2 * layer.num_kv_heads * layer.head_size
        repeated = 2 * layer.num_heads * layer.head_size
    return stored * _GATHERED + repeated * _REPEATED
