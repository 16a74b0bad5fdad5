"""The layer of multi-head latent attention around the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.compat.packed_linear import version_of
from opgraft.errors import LayerError
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, current_batch
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.attention.latent.modules import ConcatAndCacheMLA, MLAPagedAttention
from opgraft.ops.attention.modules import ScaledDotProductAttention
from opgraft.ops.attention.node import as_node
from opgraft.ops.attention.paged import visible_keys
from opgraft.ops.checks import expect_positive, expect_size
from opgraft.ops.linear.methods import HasWeightMethod, UnquantizedLinearMethod
from opgraft.ops.prefixes import claim_prefix
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

__all__ = ["MLAAttention"]


class _Chunk(NamedTuple):
    """The tokens of one sequence in a batch.

    Attributes:
        sequence: the number of the sequence.
        start: its first token among the tokens of the batch.
        end: the token behind its last.
        length: tokens of the sequence so far, these included.
    """

    sequence: int
    start: int
    end: int
    length: int


class _WeightState(NamedTuple):
    """The state of a weight when the layer copied the weight.

    The copies are right until the state changes.

    Attributes:
        weight: the weight; ``None`` for a layer without a plain one.
        address: the address of its memory.
        version: torch's count of writes; ``None`` for a tensor made in inference mode.
    """

    weight: Tensor | None
    address: int = 0
    version: int | None = None

    @classmethod
    def of(cls, weight: Tensor | None) -> _WeightState:
        if weight is None:
            return cls(None)
        version = None if weight.is_inference() else version_of(weight)
        return cls(weight, weight.data_ptr(), version)

    def is_state_of(self, weight: Tensor | None) -> bool:
        """Return True if this is the present state of ``weight``."""
        # Tensors compare element by element, so the weight itself is compared by identity.
        return self.weight is weight and self[1:] == self.of(weight)[1:]


_SIZES = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
"""The arguments of ``MLAAttention`` that are positive integers."""


@CustomOp.register("mla_attention")
class MLAAttention(CachedAttention):
    """Causal attention with keys and values made of latents.

    DeepSeek-AI, arXiv:2405.04434, section 2.1. The cache has a row for each token: the latent, and
    the rotated key of all heads. Two ways compute the same. Single tokens attend over the rows:
    their queries absorb the key projection, and the value projection maps the attended latents.
    For longer parts of prompts, the layer expands latents to keys and values of all heads, if the
    expansion takes fewer products.

    The current ``AttentionBatch`` holds the sequences, and the pages of this layer under its
    ``prefix``. Without a batch, all tokens are one sequence and nothing is kept. A replacement with
    another layout of the cache overrides ``kv_cache_shape`` and ``attend_batch``.

    Args:
        num_heads: query heads of this rank.
        scale: multiplies the scores.
        qk_nope_head_dim: elements of a query or key head that are not rotated.
        qk_rope_head_dim: rotated elements of a query or key head.
        v_head_dim: elements of a value head.
        q_lora_rank: of the model's queries; not read.
        kv_lora_rank: elements of a latent.
        kv_b_proj: maps latents ``[tokens, kv_lora_rank]`` to
            ``[tokens, num_heads · (qk_nope_head_dim + v_head_dim)]``, for each head the key and
            then the value. Some writes to its weight are not noticed: to a quantized or packed
            weight, to a weight made in inference mode, and through ``.data``. After such a write,
            call this layer's ``process_weights_after_loading``.
        cache_config: not read.
        quant_config: not read.
        prefix: the layer's path in its model, and the key of its pages.

    Raises:
        ValueError: a number of heads or a size is no positive integer.
        LayerError: ``kv_b_proj`` has a bias. Queries cannot absorb a bias.
    """

    kv_b_proj: Any
    _to_key: Tensor | None
    _to_value: Tensor | None

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        kv_b_proj: nn.Module,
        cache_config: object = None,
        quant_config: object = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.head_size = kv_lora_rank + qk_rope_head_dim

        for name in _SIZES:
            expect_size("mla_attention", name, getattr(self, name))
            expect_positive("mla_attention", name, getattr(self, name))

        if getattr(kv_b_proj, "bias", None) is not None:
            raise LayerError(
                f"attention {prefix!r}: kv_b_proj has a bias, which cannot be absorbed: give it "
                "none"
            )

        self.kv_b_proj = kv_b_proj
        self.prefix = self.layer_name = prefix
        claim_prefix(prefix, self)

        self.register_buffer("_to_key", None, persistent=False)
        self.register_buffer("_to_value", None, persistent=False)
        self._copied_from = _WeightState(None)

        self.attend = ScaledDotProductAttention()
        self.write = ConcatAndCacheMLA()
        self.attend_pages = MLAPagedAttention(kv_lora_rank, scale)

    @property
    def num_queries_per_kv(self) -> int:
        """The number of query heads: all of them share the latents."""
        return self.num_heads

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of a cache of ``num_blocks`` blocks of ``block_size`` tokens."""
        return (num_blocks, block_size, self.head_size)

    def idle(self) -> frozenset[str]:
        return frozenset() if current_batch() is not None else frozenset({"write", "attend_pages"})

    def forward(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        output_shape: Sequence[int] | torch.Size | None = None,
    ) -> Tensor:
        """Return the attended values, and write new rows to the cache.

        Args:
            q: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]``, or the same with the
                last two dimensions as one. The latter part of each head is rotated.
            kv_c_normed: latents, ``[tokens, kv_lora_rank]``, normalised.
            k_pe: the rotated keys, ``[tokens, qk_rope_head_dim]`` or
                ``[tokens, 1, qk_rope_head_dim]``.
            output_shape: the shape of the result; not read.

        Returns:
            ``[tokens, num_heads · v_head_dim]``.

        Raises:
            ValueError: a shape, a dtype or a device does not fit.
            LayerError: the batch has another number of tokens, no pages for the layer, or pages of
                another shape.
        """
        tokens = q.shape[:1]
        heads = self.num_heads
        width = heads * self.qk_head_dim
        rope = self.qk_rope_head_dim

        self._expect("q", q, (*tokens, width), (*tokens, heads, self.qk_head_dim))
        self._expect("kv_c_normed", kv_c_normed, (*tokens, self.kv_lora_rank))
        self._expect("k_pe", k_pe, (*tokens, rope), (*tokens, 1, rope))

        # One shape for the nodes of a graph.
        q = q.reshape(*tokens, width)
        k_pe = k_pe.reshape(*tokens, rope)
        if self.is_node and is_compiling():
            return as_node(q, kv_c_normed, k_pe, self.prefix, heads * self.v_head_dim)

        query = q.view(*tokens, heads, self.qk_head_dim)
        batch = current_batch()
        if batch is None:
            attended = self._expanded(query, kv_c_normed, k_pe)
        else:
            pages = self.pages(batch, len(query))
            attended = self.attend_batch(batch, pages, query, kv_c_normed, k_pe)
        return attended.flatten(1)

    def _expect(self, name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(x.shape) not in shapes:
            raise ValueError(
                f"mla_attention: {name} has shape {tuple(x.shape)}, expected {list(shapes[-1])}"
            )

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, kv_c: Tensor, k_pe: Tensor
    ) -> Tensor:
        """Write new rows to the pages and attend, from ``[tokens, num_heads, …]`` to head values.

        A replacement with a ``kv_cache_shape`` of its own overrides this.
        """
        self.write(kv_c, k_pe, pages.cache, pages.slots)
        chunks = self._chunks(batch) if batch.max_query_len > 1 else []
        expanded = []
        absorbed = []
        for chunk in chunks:
            if self._gains_by_expansion(chunk):
                expanded.append(chunk)
            else:
                absorbed.append(chunk)

        if not expanded:
            return self._absorbed(
                query, pages.cache, pages.block_table, batch.query_start_loc, batch.seq_lens
            )

        attended = query.new_empty(*query.shape[:2], self.v_head_dim)
        for chunk in expanded:
            tokens = slice(chunk.start, chunk.end)
            kv_c, k_pe = self._rows_of(chunk, pages, batch.block_size)
            attended[tokens] = self._expanded(query[tokens], kv_c, k_pe)

        if absorbed:
            self._absorb_chunks(batch, pages, query, absorbed, attended)
        return attended

    def _chunks(self, batch: AttentionBatch) -> list[_Chunk]:
        """Return the tokens of each sequence.

        The call waits for the device: only steps with prompts do so.
        """
        bounds = batch.query_start_loc.tolist()
        lengths = batch.seq_lens.tolist()
        chunks = []
        for sequence, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                chunks.append(_Chunk(sequence, start, end, lengths[sequence]))
        return chunks

    def _rows_of(self, chunk: _Chunk, pages: LayerPages, block_size: int) -> Sequence[Tensor]:
        """Return the latents and the rotated keys of a sequence so far, from the pages."""
        last_block = -(-chunk.length // block_size)
        blocks = pages.block_table[chunk.sequence, :last_block]
        rows = pages.cache[blocks].flatten(0, 1)[: chunk.length]
        return rows.tensor_split([self.kv_lora_rank], dim=-1)

    def _gains_by_expansion(self, chunk: _Chunk) -> bool:
        """Return True if keys and values of all heads take fewer products than latents do."""
        count = chunk.end - chunk.start
        pairs = count * chunk.length - count * (count - 1) // 2
        sizes = self.qk_nope_head_dim + self.v_head_dim
        saved_per_pair = 2 * self.kv_lora_rank - sizes
        # Absorption projects `count` queries and results, expansion `length` latents.
        spent = (chunk.length - count) * self.kv_lora_rank * sizes
        return count > 1 and pairs * saved_per_pair > spent

    def _absorb_chunks(
        self,
        batch: AttentionBatch,
        pages: LayerPages,
        query: Tensor,
        chunks: Sequence[_Chunk],
        attended: Tensor,
    ) -> None:
        """Attend over latents with some of the sequences; write the values to ``attended``."""
        device = query.device
        sequences = torch.tensor([chunk.sequence for chunk in chunks], device=device)
        ranges = [torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks]
        tokens = torch.cat(ranges)

        counts = batch.query_start_loc.diff()[sequences]
        starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        lengths = batch.seq_lens[sequences]
        table = pages.block_table[sequences]
        attended[tokens] = self._absorbed(query[tokens], pages.cache, table, starts, lengths)

    def _absorbed(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """Attend over latents in pages with ``[tokens, num_heads, qk_head_dim]``."""
        to_key, to_value = self._projections(query)
        q_nope, q_pe = query.tensor_split([self.qk_nope_head_dim], dim=-1)
        absorbed = torch.cat((self.by_heads(q_nope, to_key), q_pe), -1)
        latents = self.attend_pages(absorbed, cache, block_table, query_start_loc, seq_lens)
        return self.by_heads(latents, to_value)

    def by_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply ``[tokens, num_heads, in]`` by a weight of each head, ``[num_heads, in, out]``.

        On CPUs, weights lie in memory as ``[num_heads, out, in]``. A replacement with a kernel for
        the product overrides this.
        """
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def _projections(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projections to keys and from latents to values.

        The shapes are ``[num_heads, qk_nope_head_dim, kv_lora_rank]`` and
        ``[num_heads, kv_lora_rank, v_head_dim]``. On a device, they are views of a plain weight.
        """
        proj = self.kv_b_proj
        is_plain = not isinstance(proj, HasWeightMethod) or isinstance(
            proj.quant_method, UnquantizedLinearMethod
        )
        weight = proj._parameters.get("weight") if is_plain else None
        if weight is not None and not weight.is_cpu:
            by_head = weight.view(self.num_heads, -1, self.kv_lora_rank)
            to_key, to_value = by_head.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
            return to_key, to_value.transpose(1, 2)

        to_key, to_value = self._to_key, self._to_value
        if to_key is None or to_value is None or not self._copied_from.is_state_of(weight):
            to_key, to_value = self._copied_projections(weight, query)
        return to_key.transpose(1, 2), to_value.transpose(1, 2)

    def _copied_projections(self, weight: Tensor | None, query: Tensor) -> tuple[Tensor, Tensor]:
        """Copy both projections, transposed, and keep the copies with the state of the weight.

        On a CPU, oneDNN takes two to ten times as long for parts of a weight. A plain weight may
        change: then new copies follow, as prompts are expanded by the weight itself.
        """
        self._copied_from = _WeightState.of(weight)
        # Later calls with gradients use the copies, too.
        with torch.inference_mode(False), torch.no_grad():
            if weight is None:
                # The map of a unit matrix is the weight of a quantized or packed layer.
                unit = torch.eye(self.kv_lora_rank, dtype=query.dtype, device=query.device)
                weight = result_of(self.kv_b_proj(unit)).t()
            by_head = weight.reshape(self.num_heads, -1, self.kv_lora_rank)
            sizes = [self.qk_nope_head_dim, self.v_head_dim]
            to_key, to_value = torch.split_with_sizes(by_head, sizes, dim=1)
            self._to_key = to_key.transpose(1, 2).contiguous()
            self._to_value = to_value.contiguous()
        return self._to_key, self._to_value

    def process_weights_after_loading(self) -> None:
        """Forget the copies of an earlier weight."""
        self._to_key = self._to_value = None
        self._copied_from = _WeightState(None)

    def _expanded(self, query: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """Attend with the last tokens of a sequence over keys and values of all its latents."""
        count = len(query)
        length = len(kv_c)
        heads = self.num_heads
        sizes = self.qk_nope_head_dim + self.v_head_dim

        expanded = result_of(self.kv_b_proj(kv_c)).view(length, heads, sizes)
        k_nope, value = expanded.tensor_split([self.qk_nope_head_dim], dim=-1)
        # All heads share the rotated part of a key.
        shared = k_pe[:, None].expand(-1, heads, -1)
        key = torch.cat((k_nope, shared), dim=-1)

        # Torch's kernels that do not keep all scores take heads of one size only.
        value = F.pad(value, (0, max(0, self.qk_head_dim - self.v_head_dim)))
        mask = None
        if 1 < count < length:
            positions = torch.arange(length, device=query.device)
            mask = visible_keys(positions[length - count :], positions, None)
        attended = self.attend(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            mask,
            0.0,
            1 < count == length,
            scale=self.scale,
        )
        return attended[0, ..., : self.v_head_dim].transpose(0, 1)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, scale={self.scale}, kv_lora_rank={self.kv_lora_rank}"


def result_of(output: Any) -> Tensor:
    """Return the result of a linear layer, without the bias that some layers return behind."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
