"""The embedding and the output layer, with a part of the vocabulary on each rank."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.functional import Functional
from opgraft.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from opgraft.errors import LayerError, QuantizationError, WeightError
from opgraft.ops.embedding.ranges import (
    DEFAULT_VOCAB_PADDING_SIZE,
    Vocabulary,
    get_masked_input_and_mask,
)
from opgraft.ops.linear.methods import QuantizeMethodBase, UnquantizedEmbeddingMethod, forms_of
from opgraft.ops.linear.packed import PackableLayer, PackedWeight
from opgraft.ops.linear.quantization_config import QuantizationConfig, chosen_method
from opgraft.ops.prefixes import claim_prefix
from opgraft.ops.weights import LoadedTensor, copy_weight, only_copies, set_weight_attrs
from torch import Tensor, nn

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


@CustomOp.register("vocab_parallel_embedding")
class VocabParallelEmbedding(PluggableLayer):
    """Vectors for ids. A rank holds the rows of a part of the vocabulary.

    The method is from Shoeybi et al. (arXiv:1909.08053, section 3). The model's own ids are padded
    and cut. Added ids, such as the ids of adapters, are padded and cut separately, and lie at the
    end of each rank's part. With 1,010 ids, 16 of them added, a padding to 64 and two ranks there
    are 1,088 rows. Each rank has 544: 512 for own ids, then 32 for added ids.

    An id without a row gives zeros: a check of ids would wait for the device. One rank without
    added ids looks up all ids as ``torch.nn.Embedding``.

    Shapes:
        ids ``[...]`` to ``[..., embedding_dim]``.

    Args:
        num_embeddings: number of ids, with added ones.
        embedding_dim: elements of a vector.
        params_dtype: torch's default dtype if not given.
        org_num_embeddings: number of the model's own ids; all ids if not given.
        padding_size: own and added ids are each padded to a multiple of this number.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        disable_tp: keep the layer whole on every rank.

    Raises:
        LayerError: the ranks cannot share the vocabulary.
        QuantizationError: the weight method has no ``embedding``.
    """

    looks_up: ClassVar[bool] = True
    """The layer is called with ids, so the weight method needs ``embedding``."""
    _packed: PackedWeight | None = None
    bias: nn.Parameter | None
    quant_method: QuantizeMethodBase

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.tp_rank = 0 if disable_tp else get_tensor_model_parallel_rank()
        self.tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()

        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.org_vocab_size = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.padding_size = padding_size
        self.prefix = prefix

        claim_prefix(prefix, self)
        self.params_dtype = params_dtype or torch.get_default_dtype()

        vocabulary = Vocabulary(
            num_embeddings, self.org_vocab_size, padding_size, self.tp_size, prefix
        )
        shard = vocabulary.shard(self.tp_rank)
        self.vocabulary = vocabulary
        self.shard_indices = shard

        self.num_added_embeddings = num_embeddings - self.org_vocab_size
        self.org_vocab_size_padded = vocabulary.org_padded
        self.num_embeddings_padded = vocabulary.padded
        self.num_embeddings_per_partition = shard.num_elements_padded
        self.num_org_embeddings_per_partition = shard.num_org_elements
        self.num_added_embeddings_per_partition = shard.num_added_elements

        # Weight methods read the sizes above.
        chosen = chosen_method(self, quant_config, prefix)
        self.quant_method = UnquantizedEmbeddingMethod() if chosen is None else chosen
        self._expect_embedding()

        # LogitsProcessor reads the bias of an embedding, too.
        self.register_parameter("bias", None)
        self.quant_method.create_weights(
            self,
            embedding_dim,
            [self.num_embeddings_per_partition],
            embedding_dim,
            self.num_embeddings_padded,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )

    @property
    def name(self) -> str:
        """The layer as messages call it."""
        return f"{self.op_class.__qualname__} {self.prefix!r}"

    @property
    def is_unpadded(self) -> bool:
        """True if every row of this rank is for one of the model's own ids."""
        return self.num_embeddings_per_partition == self.num_org_embeddings_per_partition

    @property
    def input_size(self) -> int:
        """Elements of a hidden state, by the name in linear layers, for weight methods."""
        return self.embedding_dim

    @property
    def input_size_per_partition(self) -> int:
        """Elements of a hidden state on this rank: all elements."""
        return self.embedding_dim

    @property
    def output_size(self) -> int:
        """Rows of all ranks, with padding."""
        return self.num_embeddings_padded

    @property
    def output_partition_sizes(self) -> list[int]:
        """Rows of this rank, with padding, as for a merged layer of one."""
        return [self.num_embeddings_per_partition]

    def _expect_embedding(self) -> None:
        method = type(self.quant_method)
        if self.looks_up and method.embedding is QuantizeMethodBase.embedding:
            raise QuantizationError(
                f"{self.name}: the weight method {method.__qualname__} has no embedding(layer, "
                "input_), by which rows are looked up: let get_quant_method return None for "
                "embeddings, or define it"
            )

    def get_sharded_to_full_mapping(self) -> list[int] | None:
        """Return the columns in the gathered logits: of each id, then of padding.

        ``None`` on a single rank.
        """
        return self.vocabulary.full_mapping() if self.tp_size > 1 else None

    @only_copies
    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load the rows of this rank's own ids. Rows of other ids become zeros.

        Raises:
            WeightError: ``loaded_weight`` has another shape, or a block of ids crosses the border
                of the rank's ids.
        """
        dim: int | None = getattr(param, "output_dim", None)
        if dim is None:
            self._load_uncut(param, loaded_weight)
            return

        unit = _ids_of_element(param, dim)
        rows = -(-self.org_vocab_size // unit)
        if len(loaded_weight.shape) != param.dim() or loaded_weight.shape[dim] != rows:
            expected = f"{rows} in dimension {dim} of {param.dim()}"
            raise WeightError.of_shape(self.name, loaded_weight.shape, expected)

        start = self.shard_indices.org_vocab_start_index
        if start % unit:
            raise WeightError(
                f"{self.name} begins on this rank at id {start}, within a "
                f"block of {unit} ids that share a scale: take fewer ranks"
            )

        size = -(-self.shard_indices.num_org_elements // unit)
        own = loaded_weight.narrow(dim, start // unit, size)
        copy_weight(param.data.narrow(dim, 0, size), own, self.name)
        padding = param.data.narrow(dim, size, param.shape[dim] - size)
        padding.zero_()

    def _load_uncut(self, param: Any, loaded_weight: LoadedTensor) -> None:
        is_number = not len(loaded_weight.shape)
        target = param.data
        if is_number and getattr(param, "needs_scalar_to_array", False):
            target = target[0]
        copy_weight(target, loaded_weight, self.name)

    def forward(self, input_: Tensor) -> Tensor:
        if self.tp_size == 1 and not self.num_added_embeddings:
            return self.quant_method.embedding(self, input_)

        shard = self.shard_indices
        rows, elsewhere = get_masked_input_and_mask(
            input_,
            shard.org_vocab_start_index,
            shard.org_vocab_end_index,
            shard.num_org_vocab_padding,
            shard.added_vocab_start_index,
            shard.added_vocab_end_index,
        )
        vectors = self.quant_method.embedding(self, rows)

        # Zeros, so that the sum over the ranks has the vector of the one rank with the id.
        own = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(own) if self.tp_size > 1 else own

    def process_weights_after_loading(self) -> None:
        """Let the weight method change the weights to the layout of its kernel."""
        self.quant_method.process_weights_after_loading(self)

    def extra_repr(self) -> str:
        method = type(self.quant_method).__name__
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp_size}, {method}"


def _ids_of_element(param: Any, dim: int) -> int:
    """Return the number of ids for one element of a parameter along ``dim``."""
    if getattr(param, "packed_dim", None) == dim:
        return int(param.packed_factor)
    return int(getattr(param, "output_unit", 1))


def _sizes(layer: VocabParallelEmbedding) -> tuple[int, ...]:
    """Return the sizes for a comparison: layers with equal sizes can share a weight."""
    return (
        layer.num_embeddings,
        layer.org_vocab_size,
        layer.num_embeddings_padded,
        layer.embedding_dim,
        layer.tp_size,
    )


@CustomOp.register("parallel_lm_head")
class ParallelLMHead(PackableLayer, VocabParallelEmbedding):
    """The weight of the output layer, for ``LogitsProcessor``.

    Each rank holds a part of the vocabulary.

    Args:
        num_embeddings: number of ids, with added ones.
        embedding_dim: elements of a hidden state.
        bias: add a bias.
        params_dtype: torch's default dtype if not given.
        org_num_embeddings: number of the model's own ids; all ids if not given.
        padding_size: own and added ids are each padded to a multiple of this number.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        disable_tp: keep the layer whole on every rank.
    """

    looks_up: ClassVar[bool] = False
    called: ClassVar[bool] = False
    tied = False
    """An embedding shares the weight."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype,
            org_num_embeddings,
            padding_size,
            quant_config,
            prefix,
            disable_tp=disable_tp,
        )
        if bias:
            zeros = torch.zeros(self.num_embeddings_per_partition, dtype=self.params_dtype)
            self.bias = nn.Parameter(zeros, requires_grad=False)
            set_weight_attrs(self.bias, {"output_dim": 0, "weight_loader": self.weight_loader})

    def tie_weights(
        self, embed_tokens: VocabParallelEmbedding
    ) -> ParallelLMHead | VocabParallelEmbedding:
        """Share the weight of the embedding, and return the layer to use instead of this one.

        Raises:
            LayerError: the embedding has other sizes, or only this layer is quantized.
        """
        if _sizes(embed_tokens) != _sizes(self):
            raise LayerError(
                f"{self.name} cannot share the weight of {embed_tokens.name}: one has "
                f"{self.extra_repr()}, the other {embed_tokens.extra_repr()}. Construct both with "
                "the same sizes, or leave them untied"
            )

        # A quantized weight is no single parameter to share, so the embedding computes logits.
        if not isinstance(embed_tokens.quant_method, UnquantizedEmbeddingMethod):
            return embed_tokens
        if not isinstance(self.quant_method, UnquantizedEmbeddingMethod):
            raise LayerError(
                f"{self.name} is to be quantized, and shares the plain weight of "
                f"{embed_tokens.name}: name that one"
            )

        # A packed weight would hide the shared one.
        self.release_weights()
        self.register_parameter("weight", embed_tokens.get_parameter("weight"))
        self.tied = True
        return self

    def forms(self) -> tuple[Functional[..., Tensor], ...]:
        return forms_of(self)

    def forward(self, input_: Tensor) -> Tensor:
        raise LayerError(
            f"{self.name} is not called itself: LogitsProcessor computes logits from its weight "
            "and hidden states"
        )
