"""Encoders of the BERT family (Devlin et al., arXiv:1810.04805), for embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError, close_matches
from opgraft.models.description import architecture_config, joined, quantization_config
from opgraft.models.model import Model
from opgraft.models.names import ShardId, WeightsMapper
from opgraft.ops.activation import GELUTanh
from opgraft.ops.attention import MMEncoderAttention
from opgraft.ops.attention.batch import current_boundaries
from opgraft.ops.attention.node import as_node
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.layernorm import LayerNorm
from opgraft.ops.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.sharding import InputShard
from torch import Tensor, nn
from torch.compiler import is_compiling

ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "gelu": nn.GELU,
        "gelu_new": GELUTanh,
        "gelu_pytorch_tanh": GELUTanh,
        "relu": nn.ReLU,
        "silu": nn.SiLU,
    }
)
"""Activations of encoders by their names in configs."""


def places_beside_padding(input_ids: Tensor, positions: Tensor, padding: int) -> Tensor:
    """Return the rows ``[tokens]`` of position embeddings that count from the row of the padding.

    A padding token inside a text has the row of the padding, and is not counted, as in
    transformers. Example: the rows of ``[5, 1, 7]`` are ``[2, 1, 3]`` if the padding is token 1.

    Args:
        input_ids: ``[tokens]`` of whole texts, one after another.
        positions: ``[tokens]``, from 0 in each text.
        padding: the padding token, which is the row of the padding as well.
    """
    tokens = (input_ids != padding).long()
    # The texts lie in one row, so the sum runs through all of them.
    counted = tokens.cumsum(0)
    places = torch.arange(tokens.shape[0], device=tokens.device)
    starts = places - positions
    # The sum before the first token of each text.
    earlier_texts = counted[starts] - tokens[starts]
    number = counted - earlier_texts
    return padding + number * tokens


class EncoderEmbeddings(nn.Module):
    """The sum of the embeddings of words, positions and token types, normalised."""

    def __init__(
        self, config: Any, first_position: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=f"{prefix}.word_embeddings",
        )
        # These tables are small, so that every rank has the whole.
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.first_position = first_position

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return embeddings ``[tokens, hidden_size]``.

        Args:
            input_ids: ``[tokens]``.
            positions: ``[tokens]``.
            token_type_ids: ``[tokens]``; zeros by default.
        """
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        words: Tensor = self.word_embeddings(input_ids)
        rows = positions
        if self.first_position:
            rows = places_beside_padding(input_ids, positions, self.first_position - 1)
        # transformers sums in this order.
        total = words + self.token_type_embeddings(types) + self.position_embeddings(rows)
        normalised: Tensor = self.LayerNorm(total)
        return normalised


class SequenceAttention(nn.Module):
    """Attention within each sequence of the batch, in both directions.

    Args:
        num_heads: the number of heads of this rank.
        head_size: elements of a head.
        prefix: the layer's path in the model.

    Attributes:
        is_node: the layer becomes one node of a compiler's graph. The graph must be called within
            ``AttentionNodes.entered``.
    """

    is_node = False

    def __init__(self, num_heads: int, head_size: int, prefix: str) -> None:
        super().__init__()
        self.inner = MMEncoderAttention(num_heads, head_size, prefix=prefix)
        self.prefix = prefix

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with ``[tokens, num_heads * head_size]`` of the current ``AttentionBatch``."""
        # The lengths of sequences differ from call to call, and would be compiled into the graph.
        if self.is_node and is_compiling():
            return as_node(query, key, value, self.prefix)
        # The op takes a batch. Here it is one row with all sequences, and their boundaries.
        attended: Tensor = self.inner(query[None], key[None], value[None], current_boundaries())
        return attended[0]


def sequence_attention(model: nn.Module) -> dict[str, SequenceAttention]:
    """Return the attention layers of an encoder by prefix. Other models have none."""
    return {
        layer.prefix: layer for layer in model.modules() if isinstance(layer, SequenceAttention)
    }


class EncoderSelfAttention(nn.Module):
    """The projections to query, key and value, and the attention."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            config.hidden_size // heads,
            heads,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv",
            return_bias=False,
        )
        self.attn = SequenceAttention(self.qkv.num_heads, self.qkv.head_size, f"{prefix}.attn")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Attend with ``[tokens, hidden_size]``."""
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        attended: Tensor = self.attn(query, key, value)
        return attended


class EncoderOutput(nn.Module):
    """A projection with the residual added, normalised.

    Args:
        config: the config of the architecture.
        input_size: elements of the input on all ranks.
        quant_config: the quantization of the projection.
        prefix: the layer's path.
        shard: the part of the input on this rank, if ranks have parts of different sizes.
    """

    def __init__(
        self,
        config: Any,
        input_size: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        shard: InputShard | None = None,
    ) -> None:
        super().__init__()
        others: Any = {
            "quant_config": quant_config,
            "prefix": f"{prefix}.dense",
            "return_bias": False,
        }
        # Without the argument, a replacement that is written for vLLM's signature works, too.
        if shard is not None:
            others["shard"] = shard
        self.dense = RowParallelLinear(input_size, config.hidden_size, **others)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """Map ``[tokens, input_size / ranks]`` to ``[tokens, hidden_size]``."""
        normalised: Tensor = self.LayerNorm(self.dense(hidden_states) + residual)
        return normalised


class EncoderAttention(nn.Module):
    """Attention with its output projection."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.self = EncoderSelfAttention(config, quant_config, f"{prefix}.self")
        self.output = EncoderOutput(
            config,
            config.hidden_size,
            quant_config,
            f"{prefix}.output",
            self.self.qkv.uneven_output(),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        attended: Tensor = self.output(self.self(hidden_states), hidden_states)
        return attended


class EncoderIntermediate(nn.Module):
    """The first half of the feed-forward layer."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise ModelError(
                f"{type(config).__name__}: hidden_act is {config.hidden_act!r}: "
                f"{close_matches(str(config.hidden_act), ACTIVATIONS)}"
            )
        self.dense = ColumnParallelLinear(
            config.hidden_size,
            config.intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.dense",
            return_bias=False,
        )
        self.intermediate_act_fn = ACTIVATIONS[config.hidden_act]()

    def forward(self, hidden_states: Tensor) -> Tensor:
        activated: Tensor = self.intermediate_act_fn(self.dense(hidden_states))
        return activated


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each added to its input and normalised."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.attention = EncoderAttention(config, quant_config, f"{prefix}.attention")
        self.intermediate = EncoderIntermediate(config, quant_config, f"{prefix}.intermediate")
        self.output = EncoderOutput(
            config, config.intermediate_size, quant_config, f"{prefix}.output"
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        attended = self.attention(hidden_states)
        output: Tensor = self.output(self.intermediate(attended), attended)
        return output


class EncoderStack(nn.Module):
    """The layers, one after another."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            EncoderLayer(config, quant_config, f"{prefix}.layer.{number}")
            for number in range(config.num_hidden_layers)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states)
        return hidden_states


def _expect_encoder(config: Any) -> None:
    """Refuse settings that encoders here do not follow.

    Raises:
        ModelError: the config has such a setting.
    """
    computed: Mapping[str, object] = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }
    for name, expected in computed.items():
        # Newer configs of transformers lack some of these settings.
        value = getattr(config, name, None)
        if value not in (expected, None):
            raise ModelError(
                f"{type(config).__name__}: {name} is {value!r:.40}, and encoders attend both ways, "
                f"within the text, over absolute positions: only {expected!r} is computed"
            )


@PluggableClass.register("BertModel")
class BertModel(Model):
    """BERT (arXiv:1810.04805): token ids to hidden states.

    The pooler is not loaded, as embeddings do not use it.

    Args:
        opgraft_config: the ``model`` section names the checkpoint with the architecture's config.
        prefix: the path of this model in a larger one.

    Raises:
        ModelError: the config describes another kind of attention or positions.
    """

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = {
        "qkv": {"query": "q", "key": "k", "value": "v"}
    }
    weights_mapper = WeightsMapper(
        prefixes={"bert.": "", "roberta.": "", "cls.": None, "lm_head.": None},
        # The first checkpoints were converted from TensorFlow and have these names.
        substrings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    )
    ignored_weights: Sequence[str] = ("*pooler.*",)
    """Patterns of tensors in checkpoints that this model does not read."""

    embedding_weight: ClassVar[str] = "embeddings.word_embeddings.weight"

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        config = self.config or architecture_config(opgraft_config)
        _expect_encoder(config)
        quant_config = quantization_config(opgraft_config, self)
        first_position = self.first_position(config)
        # RoBERTa's config counts the rows of padding as positions: 514 rows hold 512 tokens.
        rows = config.max_position_embeddings - first_position
        if rows < 1:
            raise ModelError(
                f"{type(config).__name__}: max_position_embeddings is "
                f"{config.max_position_embeddings}, and the first token takes the position "
                f"{first_position}: correct config.json"
            )
        self.max_position = min(self.max_position, rows)
        self.embeddings = EncoderEmbeddings(
            config, first_position, quant_config, joined(prefix, "embeddings")
        )
        self.encoder = EncoderStack(config, quant_config, joined(prefix, "encoder"))

    @staticmethod
    def first_position(config: Any) -> int:
        """Return the row of the position embeddings for the first token.

        With a first row above 0, the row before serves the padding token of the same number.
        """
        return 0

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states ``[tokens, hidden_size]`` of ids and positions ``[tokens]``.

        The tokens belong to the current ``AttentionBatch``, or to one sequence without a batch.
        """
        hidden_states = self.embeddings(input_ids, positions, token_type_ids)
        output: Tensor = self.encoder(hidden_states)
        return output


class Labels:
    """The labels of a config, and the function from scores to probabilities."""

    def __init__(self, config: Any) -> None:
        by_number = config.id2label
        # JSON has no order of keys. The numbers are columns of the classifier.
        self.names = tuple(str(by_number[number]) for number in sorted(by_number))
        self._activation = _ACTIVATIONS_OF_SCORES[_activation(config, len(self.names))]

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities of scores ``[texts, labels]``, or scores if the config says so."""
        return self._activation(scores.float())


_ACTIVATIONS_OF_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Identity": lambda scores: scores,
        "Sigmoid": torch.sigmoid,
        "Softmax": lambda scores: scores.softmax(-1),
    }
)


def _activation(config: Any, labels: int) -> str:
    """Return the name of the function from scores to probabilities, in the order of vLLM.

    Raises:
        ModelError: sentence-transformers would use another function.
    """
    # The score of a single label is a relevance.
    usual = "Sigmoid" if labels == 1 else "Softmax"
    if config.problem_type == "regression":
        return "Identity"
    # Each label of several is true or false by itself, so probabilities do not add up to 1.
    if config.problem_type == "multi_label_classification":
        return "Sigmoid"
    settings = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    named = settings.get("activation_fn") or older
    if config.problem_type is not None or named is None:
        return usual
    # The config has the path of a class, such as "torch.nn.modules.linear.Identity".
    name = str(named).rpartition(".")[2]
    if name not in _ACTIVATIONS_OF_SCORES:
        raise ModelError(
            f"{type(config).__name__}: activation_fn is {named!r:.80}, and scores go through "
            f"{', '.join(_ACTIVATIONS_OF_SCORES)} only: use sentence-transformers"
        )
    return name


class _Dense(nn.Module):
    """A linear layer in a place of its own, as checkpoints name it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(self.dense(states))


@PluggableClass.register("BertForSequenceClassification")
class BertForSequenceClassification(BertModel):
    """BERT with labels for a text, or for a pair such as a question and a document.

    Attributes:
        labels: names of the labels.
    """

    ignored_weights = ()

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        config = self.config or architecture_config(opgraft_config)
        self._labels = Labels(config)
        self.labels = self._labels.names
        self.pooler = _Dense(config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, len(self.labels))

    def probabilities(self, first_states: Tensor) -> Tensor:
        """Return ``[texts, labels]`` from the states ``[texts, hidden_size]`` of first tokens."""
        return self._labels.probabilities(self.classifier(self.pooler(first_states)))


@PluggableClass.register("RobertaModel")
class RobertaModel(BertModel):
    """RoBERTa (arXiv:1907.11692): BERT with positions that begin after the position of padding."""

    @staticmethod
    def first_position(config: Any) -> int:
        # The position of padding has the number of the padding token.
        padding = config.pad_token_id
        if not isinstance(padding, int) or padding < 0:
            raise ModelError(
                f"{type(config).__name__}: pad_token_id is {padding!r:.40}, and positions begin "
                "after its number: give the token of padding in config.json, usually 1"
            )
        return padding + 1


@PluggableClass.register("XLMRobertaModel")
class XLMRobertaModel(RobertaModel):
    """XLM-RoBERTa (arXiv:1911.02116): RoBERTa for a hundred languages."""


class _RobertaHead(_Dense):
    """The head of RoBERTa: a linear layer, and another one to the labels."""

    def __init__(self, size: int, labels: int) -> None:
        super().__init__(size)
        self.out_proj = nn.Linear(size, labels)

    def forward(self, states: Tensor) -> Tensor:
        scores: Tensor = self.out_proj(super().forward(states))
        return scores


@PluggableClass.register("RobertaForSequenceClassification")
class RobertaForSequenceClassification(RobertaModel):
    """RoBERTa with labels for a text, or for a pair such as a question and a document.

    Attributes:
        labels: names of the labels.
    """

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        config = self.config or architecture_config(opgraft_config)
        self._labels = Labels(config)
        self.labels = self._labels.names
        self.classifier = _RobertaHead(config.hidden_size, len(self.labels))

    def probabilities(self, first_states: Tensor) -> Tensor:
        """Return ``[texts, labels]`` from the states ``[texts, hidden_size]`` of first tokens."""
        return self._labels.probabilities(self.classifier(first_states))


@PluggableClass.register("XLMRobertaForSequenceClassification")
class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """XLM-RoBERTa with labels for a text or a pair."""
