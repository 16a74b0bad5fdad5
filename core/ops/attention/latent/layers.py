"""The layer of multi-head latent attention that has the cache."""

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


class _Chunk(NamedTuple):
    """Tokens of a sequence in a batch, from ``start`` to before ``end``, and its length with them."""

    sequence: int
    start: int
    end: int
    length: int


class _Seen(NamedTuple):
    """A weight as it was when copies were made of it: they are right while nothing of this changes.

    ``version`` counts the writes to it; tensors made in inference mode have none.
    """

    weight: Tensor | None
    address: int = 0
    version: int | None = None

    @classmethod
    def of(cls, weight: Tensor | None) -> _Seen:
        if weight is None:
            return cls(None)
        return cls(weight, weight.data_ptr(), None if weight.is_inference() else version_of(weight))

    def is_still(self, weight: Tensor | None) -> bool:
        """Tell whether ``weight`` is that weight, as it was."""
        return self.weight is weight and self[1:] == self.of(weight)[1:]


@CustomOp.register("mla_attention")
class MLAAttention(CachedAttention):
    """Causal attention whose keys and values are made of latents (DeepSeek-AI, arXiv:2405.04434, section 2.1).

    The cache has a row for each token, its latent and the rotated key that all heads share, and nothing else. There are
    two ways to compute the same. Single tokens attend over the rows: the key projection is absorbed in their queries,
    the value projection is applied to what they attended. Of longer parts of prompts the latents are expanded to keys
    and values of all heads, wherever that takes fewer products.

    The sequences, and the pages of this layer under its ``prefix``, are those of the current ``AttentionBatch``. Where
    there is none, all tokens are one sequence and nothing is kept. A replacement may lay its cache out as it likes: it
    overrides ``kv_cache_shape`` and ``attend_batch``.

    Args:
        num_heads: query heads of this rank.
        scale: multiplies the scores.
        qk_nope_head_dim: elements of a query or key head that are not rotated.
        qk_rope_head_dim: those that are.
        v_head_dim: elements of a value head.
        q_lora_rank: of the model's queries; not read.
        kv_lora_rank: elements of a latent.
        kv_b_proj: maps latents ``[tokens, kv_lora_rank]`` to ``[tokens, num_heads · (qk_nope_head_dim + v_head_dim)]``,
            of each head the key and then the value.
            After writes to a weight that is quantized or packed, or was made in inference mode, and after those that
            torch does not count, as through ``.data``, call this layer's ``process_weights_after_loading``.
        cache_config: not read.
        quant_config: not read.
        prefix: the layer's path in its model, under which its pages are found.

    Raises:
        ValueError: a number of heads or a size is no positive integer.
        LayerError: ``kv_b_proj`` has a bias, which cannot be absorbed.
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
        for name in (
            "num_heads",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "kv_lora_rank",
        ):
            expect_size("mla_attention", name, getattr(self, name))
            expect_positive("mla_attention", name, getattr(self, name))
        if getattr(kv_b_proj, "bias", None) is not None:
            raise LayerError(
                f"attention {prefix!r}: kv_b_proj has a bias, which cannot be absorbed: give it none"
            )
        self.kv_b_proj = kv_b_proj
        self.prefix = self.layer_name = prefix
        claim_prefix(prefix, self)
        self.register_buffer("_to_key", None, persistent=False)
        self.register_buffer("_to_value", None, persistent=False)
        self._made_of = _Seen(None)
        self.attend = ScaledDotProductAttention()
        self.write = ConcatAndCacheMLA()
        self.attend_pages = MLAPagedAttention(kv_lora_rank, scale)

    @property
    def num_queries_per_kv(self) -> int:
        """All query heads, which share the latents."""
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
        """Return the attended values, ``[tokens, num_heads · v_head_dim]``; new rows go to the cache.

        Args:
            q: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]`` or with the last two as one; the latter part
                of each head is rotated.
            kv_c_normed: latents, ``[tokens, kv_lora_rank]``, normalised.
            k_pe: the rotated keys, ``[tokens, qk_rope_head_dim]`` or ``[tokens, 1, qk_rope_head_dim]``.
            output_shape: not read: it is that of the result.

        Raises:
            ValueError: a shape, a dtype or a device does not fit.
            LayerError: the batch has another number of tokens, no pages for the layer or some of another shape.
        """
        tokens, width = q.shape[:1], self.num_heads * self.qk_head_dim
        self._expect("q", q, (*tokens, width), (*tokens, self.num_heads, self.qk_head_dim))
        self._expect("kv_c_normed", kv_c_normed, (*tokens, self.kv_lora_rank))
        self._expect(
            "k_pe", k_pe, (*tokens, self.qk_rope_head_dim), (*tokens, 1, self.qk_rope_head_dim)
        )
        q, k_pe = q.reshape(*tokens, width), k_pe.reshape(*tokens, self.qk_rope_head_dim)
        if self.is_node and is_compiling():
            return as_node(q, kv_c_normed, k_pe, self.prefix, self.num_heads * self.v_head_dim)
        query, batch = q.view(*tokens, self.num_heads, self.qk_head_dim), current_batch()
        if batch is None:
            attended = self._expanded(query, kv_c_normed, k_pe)
        else:
            attended = self.attend_batch(
                batch, self.pages(batch, len(query)), query, kv_c_normed, k_pe
            )
        return attended.flatten(1)

    def _expect(self, name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(x.shape) not in shapes:
            raise ValueError(
                f"mla_attention: {name} has shape {tuple(x.shape)}, expected {list(shapes[-1])}"
            )

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, kv_c: Tensor, k_pe: Tensor
    ) -> Tensor:
        """Write new rows to the pages and attend, from ``[tokens, num_heads, …]`` to values of the heads.

        A replacement whose ``kv_cache_shape`` has a layout of its own overrides this.
        """
        self.write(kv_c, k_pe, pages.cache, pages.slots)
        chunks = self._chunks(batch) if batch.max_query_len > 1 else []
        expanded = [chunk for chunk in chunks if self._gains_by_expansion(chunk)]
        if not expanded:
            return self._absorbed(
                query, pages.cache, pages.block_table, batch.query_start_loc, batch.seq_lens
            )
        attended = query.new_empty(*query.shape[:2], self.v_head_dim)
        for chunk in expanded:
            blocks = pages.block_table[chunk.sequence, : -(-chunk.length // batch.block_size)]
            kv_c, k_pe = (
                pages.cache[blocks]
                .flatten(0, 1)[: chunk.length]
                .tensor_split([self.kv_lora_rank], dim=-1)
            )
            attended[chunk.start : chunk.end] = self._expanded(
                query[chunk.start : chunk.end], kv_c, k_pe
            )
        if len(expanded) < len(chunks):
            self._absorb_others(
                batch, pages, query, [chunk for chunk in chunks if chunk not in expanded], attended
            )
        return attended

    def _chunks(self, batch: AttentionBatch) -> list[_Chunk]:
        """List what there is of each sequence; a device is waited for, in steps that have prompts only."""
        bounds, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        parts = enumerate(zip(pairwise(bounds), lengths, strict=True))
        return [_Chunk(i, start, end, length) for i, ((start, end), length) in parts if end > start]

    def _gains_by_expansion(self, chunk: _Chunk) -> bool:
        """Tell whether keys and values of all heads take fewer products than latents do."""
        count = chunk.end - chunk.start
        pairs = count * chunk.length - count * (count - 1) // 2
        saved = 2 * self.kv_lora_rank - self.qk_nope_head_dim - self.v_head_dim
        expansion = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return count > 1 and pairs * saved > (chunk.length - count) * expansion

    def _absorb_others(
        self,
        batch: AttentionBatch,
        pages: LayerPages,
        query: Tensor,
        chunks: Sequence[_Chunk],
        attended: Tensor,
    ) -> None:
        """Attend over latents with some of the sequences, and put the values in their places."""
        device = query.device
        sequences = torch.tensor([chunk.sequence for chunk in chunks], device=device)
        tokens = torch.cat(
            [torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks]
        )
        starts = F.pad(batch.query_start_loc.diff()[sequences].cumsum(0, dtype=torch.int32), (1, 0))
        lengths, table = batch.seq_lens[sequences], pages.block_table[sequences]
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
        absorbed = self.by_heads(q_nope, to_key)
        latents = self.attend_pages(
            torch.cat((absorbed, q_pe), -1), cache, block_table, query_start_loc, seq_lens
        )
        return self.by_heads(latents, to_value)

    def by_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply ``[tokens, num_heads, in]`` by a weight of each head, ``[num_heads, in, out]``.

        A replacement that has a kernel for it overrides this. On CPUs weights lie as ``[num_heads, out, in]``.
        """
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def _projections(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key projection, ``[num_heads, qk_nope_head_dim, kv_lora_rank]``, and that of values, transposed.

        On a device the weight of a plain ``kv_b_proj`` is viewed. Of a quantized or packed one copies are kept, which
        it makes of a unit matrix; and on a CPU of any, as oneDNN takes two to ten times as long for parts of a weight.
        Copies of a plain weight are made anew when it has changed, as prompts are expanded by the weight itself.
        """
        proj, sizes = self.kv_b_proj, [self.qk_nope_head_dim, self.v_head_dim]
        plain = not isinstance(proj, HasWeightMethod) or isinstance(
            proj.quant_method, UnquantizedLinearMethod
        )
        weight = proj._parameters.get("weight") if plain else None
        if weight is not None and not weight.is_cpu:
            to_key, to_value = weight.view(self.num_heads, -1, self.kv_lora_rank).split(
                sizes, dim=1
            )
            return to_key, to_value.transpose(1, 2)
        if self._to_key is None or self._to_value is None or not self._made_of.is_still(weight):
            self._made_of = _Seen.of(weight)
            with torch.inference_mode(False), torch.no_grad():
                if weight is None:
                    unit = torch.eye(self.kv_lora_rank, dtype=query.dtype, device=query.device)
                    weight = result_of(proj(unit)).t()
                to_key, to_value = weight.reshape(self.num_heads, -1, self.kv_lora_rank).split(
                    sizes, dim=1
                )
                self._to_key = to_key.transpose(1, 2).contiguous()
                self._to_value = to_value.contiguous()
        return self._to_key.transpose(1, 2), self._to_value.transpose(1, 2)

    def process_weights_after_loading(self) -> None:
        """Forget what was made of an earlier weight."""
        self._to_key = self._to_value = None
        self._made_of = _Seen(None)

    def _expanded(self, query: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """Attend with the last tokens of a sequence over all of its latents, expanded to keys and values."""
        count, length = len(query), len(kv_c)
        expanded = result_of(self.kv_b_proj(kv_c)).view(
            length, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        k_nope, value = expanded.tensor_split([self.qk_nope_head_dim], dim=-1)
        key = torch.cat((k_nope, k_pe[:, None].expand(-1, self.num_heads, -1)), dim=-1)
        # Torch's kernels that do not keep all scores take heads of one size only.
        value = F.pad(value, (0, max(0, self.qk_head_dim - self.v_head_dim)))
        mask = None
        if 1 < count < length:
            positions = torch.arange(length, device=query.device)
            mask = visible_keys(positions[length - count :], positions, None)
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        attended = self.attend(*heads, mask, 0.0, 1 < count == length, scale=self.scale)
        return attended[0, ..., : self.v_head_dim].transpose(0, 1)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, scale={self.scale}, kv_lora_rank={self.kv_lora_rank}"


def result_of(output: Any) -> Tensor:
    """Return what a linear layer computed, of which some return the bias, too."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
