"""GGUF files as checkpoints of transformers: names, rows and offsets of tensors, and the config.

``convert_hf_to_gguf.py`` of llama.cpp writes the files. Each table here undoes a step of that
program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from opgraft.errors import CheckpointError, close_matches
from opgraft.models.lazy import Bounds, LazyTensor, StoredTensor
from opgraft.models.settings_keys import GGUF_GENERAL, GGUF_NO_MODELS, refusals


@dataclass(frozen=True)
class GgufFamily:
    """One architecture of GGUF, in the terms of transformers.

    Attributes:
        model_type: the configuration of transformers.
        architecture: the class of the model.
        permuted: the rows of queries and keys were reordered within each head, so that neighbouring
            pairs are rotated.
        norm_offset: 1 was added to the weights of norms.
        norms: the norms of a layer, each as name in GGUF and name in transformers.
        reads: the keys of ``_SCALES`` that the config of the family has a setting for.
        blocks_of_27b: layers of the model with 27 billion parameters. That model divides scores
            by the root of ``hidden_size / heads`` instead of the root of the head size.
    """

    model_type: str
    architecture: str
    permuted: bool = False
    norm_offset: bool = False
    norms: tuple[tuple[str, str], ...] = (
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
    )
    reads: tuple[str, ...] = ()
    blocks_of_27b: int | None = None


_SANDWICH = (
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_POST = (
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_CAPPED = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys with the value 0 for no window or no cap."""

_SCALED = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_GEMMA2 = GgufFamily("gemma2", "Gemma2ForCausalLM", False, True, _SANDWICH, _CAPPED, 46)

FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("llama", "LlamaForCausalLM", permuted=True),
        "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM"),
        "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM"),
        "phi3": GgufFamily("phi3", "Phi3ForCausalLM", reads=("attention.sliding_window",)),
        "gemma": GgufFamily("gemma", "GemmaForCausalLM", norm_offset=True),
        "gemma2": _GEMMA2,
        "gemma3": replace(
            _GEMMA2, model_type="gemma3_text", architecture="Gemma3ForCausalLM", blocks_of_27b=62
        ),
        "granite": GgufFamily("granite", "GraniteForCausalLM", permuted=True, reads=_SCALED),
        "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", norms=_POST),
    }
)
"""Families by ``general.architecture``. Mistral and SmolLM have the name llama there."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SCALES = {
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Settings of some families only."""

_ROPE = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_READ = {
    *_CONFIG,
    *_ROPE,
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.dimension_count",
    "attention.value_length",
}
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
"""Keys that change nothing in the model."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_SCALES, (0,)),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0, 1)),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
"""Keys that change the model, unless they have one of these values."""

_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def _expect_model(metadata: Mapping[str, Any], file: object) -> None:
    """Refuse files that hold something else, such as an adapter.

    Raises:
        CheckpointError: the metadata says so.
    """
    problems = refusals(GGUF_GENERAL, metadata)
    architecture = metadata.get("general.architecture")
    kinds = {str(metadata.get("general.type")), str(architecture)}
    # Some files have no general.type, and tell by keys such as adapter.type.
    kinds |= {key.partition(".")[0] for key in metadata}
    known = [row for name, row in GGUF_NO_MODELS.items() if name in kinds]
    if not problems and not known:
        return
    contents, advice = ("something else", "Load the file of the model")
    if known:
        contents, advice = known[0]
    shown = "; ".join(problems[:3]) or f"general.architecture is {architecture!r:.80}"
    raise CheckpointError(f"{file} holds {contents}, no model: {shown}. {advice}.")


def family_of(metadata: Mapping[str, Any], file: object) -> GgufFamily:
    """Return the family of the model in a file.

    Raises:
        CheckpointError: the file holds no model, or the family is not known.
    """
    _expect_model(metadata, file)
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{file} has the architecture {name!r:.80}, which is not known here: "
            f"{close_matches(str(name)[:80], FAMILIES)} Take the checkpoint as safetensors instead."
        )
    return FAMILIES[name]


def _settings_of_architecture(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the architecture without its name: ``llama.block_count`` is one."""
    start = f"{metadata['general.architecture']}."
    return {key[len(start) :]: value for key, value in metadata.items() if key.startswith(start)}


def config_values(
    metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor], file: object
) -> dict[str, Any]:
    """Return the settings of a file by their names in ``config.json``.

    Raises:
        CheckpointError: the architecture is not known, a setting is no number, or the config has
            no place for a setting that changes the model. The message lists the settings.
    """
    family = family_of(metadata, file)
    given = _settings_of_architecture(metadata)
    found = _numbers(given, metadata, family, file)
    problems = [*_unread(given, family), *_contradictions(given, family, tensors)]
    if problems:
        raise CheckpointError.listing(
            f"{file} has settings that are not read here, and the model would differ without them",
            problems,
            "take the checkpoint as safetensors",
        )
    # Some files leave the size out, as the list of tokens has it.
    if "vocab_size" not in found and "tokenizer.ggml.tokens" in metadata:
        found["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **found,
        # GGUF has no such key: a tied head is left out.
        "tie_word_embeddings": "output.weight" not in tensors,
        **_rope(given, tensors),
        **_query_scale(given, family),
        **_biases(metadata, tensors),
    }


def _numbers(
    given: Mapping[str, Any], metadata: Mapping[str, Any], family: GgufFamily, file: object
) -> dict[str, Any]:
    """Return the settings that are a number in GGUF and in ``config.json``, by their names there.

    Raises:
        CheckpointError: a setting that should be a number is none.
    """
    names = {**_CONFIG, **{key: _SCALES[key] for key in family.reads}}
    found = {name: given[key] for key, name in names.items() if key in given}
    found |= {name: metadata[key] for key, name in _TOKENS.items() if key in metadata}
    checked = {key: given[key] for key in {*names, *_READ} if key in given}
    # The only setting that is a text.
    checked.pop("rope.scaling.type", None)
    wrong = []
    for key, value in {**checked, **found}.items():
        # Some architectures have a list, with a number for each layer.
        if type(value) not in (int, float):
            wrong.append(f"{key} is {value!r:.50}")
    if wrong:
        raise CheckpointError.listing(
            f"{file} has settings that are no numbers", wrong, "take another file"
        )
    for key in _CAPPED:
        if key in family.reads and key in given:
            found[_SCALES[key]] = given[key] or None
    return found


def _unread(given: Mapping[str, Any], family: GgufFamily) -> Iterator[str]:
    """Yield the settings that change the model and have no place in the config."""
    for key in sorted(set(given) - _READ - _HARMLESS - set(family.reads)):
        if given[key] not in _NEUTRAL.get(key, ()):
            yield f"{key!r:.80} is {given[key]!r:.50}"


def _contradictions(
    given: Mapping[str, Any], family: GgufFamily, tensors: Mapping[str, LazyTensor]
) -> Iterator[str]:
    """Yield the settings with values that no model of opgraft has."""
    head = _head_size(given)
    if given.get("attention.value_length", head) != head:
        yield f"attention.value_length is {given['attention.value_length']}, and keys have {head}"
    turned = given.get("rope.dimension_count", head)
    # Of these families, only Phi-3 rotates a part of a head.
    if turned != head and (family.model_type != "phi3" or not 0 < turned < head):
        yield f"rope.dimension_count is {turned}, and heads have {head}"
    kind = given.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        yield f"rope.scaling.type is {kind!r:.50}"
    if kind == "yarn" and "rope.scaling.factor" not in given:
        yield "rope.scaling.type is 'yarn' without rope.scaling.factor"
    if _ROPE_FREQS in tensors:
        yield from _unread_frequencies(given, family, tensors[_ROPE_FREQS])


def _head_size(given: Mapping[str, Any]) -> int:
    """Return the size of a head; 0 if the file does not tell."""
    # Without heads, the division gives 0.
    heads = given.get("attention.head_count") or math.inf
    usual = given.get("embedding_length", 0) // heads
    return int(given.get("attention.key_length", usual))


def _query_scale(given: Mapping[str, Any], family: GgufFamily) -> dict[str, Any]:
    """Return the divisor of scores of a Gemma. GGUF has no key for the divisor.

    Like llama.cpp (``src/llama-model.cpp``, ``f_attention_scale``), this tells the models of 27
    billion parameters by the number of layers. Their divisors 144 and 168 are in
    google/gemma_pytorch, ``gemma/config.py``.
    """
    head_size = _head_size(given)
    if family.blocks_of_27b is None or not head_size:
        return {}
    scalar = head_size
    if given.get("block_count") == family.blocks_of_27b:
        scalar = given["embedding_length"] // given["attention.head_count"]
    return {"query_pre_attn_scalar": scalar}


def _rope(given: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the scaling of positions and the part of a head that is rotated."""
    head = _head_size(given)
    part = given.get("rope.dimension_count", head)
    values: dict[str, Any] = {}
    if part != head:
        values["partial_rotary_factor"] = part / head
    scaling = _rope_scaling(given, tensors)
    if scaling:
        values["rope_scaling"] = scaling
    return values


def _rope_scaling(given: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return ``rope_scaling`` of ``config.json``; empty for a rope without scaling."""
    if _ROPE_FREQS in tensors:
        factor = _greatest_divisor(tensors[_ROPE_FREQS])
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # As in llama.cpp, a factor without a type is linear.
    kind = given.get("rope.scaling.type", "linear")
    if kind == "yarn":
        found = {name: given[key] for key, name in _ROPE.items() if key in given}
        return {"rope_type": kind, **found}
    factor = given.get("rope.scaling.factor") or given.get("rope.scale_linear") or 1
    if kind != "linear" or factor == 1:
        return {}
    return {"rope_type": kind, "factor": float(factor)}


def _greatest_divisor(frequencies: LazyTensor) -> float:
    return float(frequencies[...].max())


def _unread_frequencies(
    given: Mapping[str, Any], family: GgufFamily, frequencies: LazyTensor
) -> Iterator[str]:
    """Yield the reason why the config cannot hold the divisors of a rope's frequencies, if any.

    The config can hold the divisors of Llama 3.1 and later: 1 for short waves, the factor for long
    waves, and a mean for waves in between (arXiv:2407.21783, the rope ``llama3`` of transformers).
    """
    head = _head_size(given)
    base = given.get("rope.freq_base", 10000.0)
    has_type = given.get("rope.scaling.type", "none") != "none"
    is_scaled = has_type or "rope.scaling.factor" in given
    has_shape = head > 0 and tuple(frequencies.shape) == (head // 2,)
    if family.model_type != "llama" or is_scaled or not has_shape:
        yield (
            f"the tensor {_ROPE_FREQS} of shape {list(frequencies.shape)}, beside another rope "
            "than Llama's"
        )
        return
    trained = _LLAMA3["original_max_position_embeddings"]
    # How often each pair of elements turns within the trained context: seldom for a long wave.
    turns = trained / (2 * math.pi) / base ** (torch.arange(0, head, 2) / head)
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - share) / _greatest_divisor(frequencies) + share)
    # Files have float32, and the exponents are rounded differently.
    if not torch.allclose(frequencies[...].float(), expected, rtol=1e-3):
        yield (
            f"the tensor {_ROPE_FREQS} is not that of rope_type llama3 with its greatest factor "
            f"and {_LLAMA3}"
        )


def _biases(metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the flags for biases of a llama. The metadata has none, so the tensors tell."""
    if metadata["general.architecture"] != "llama":
        return {}
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def renamed(
    metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor], file: object
) -> dict[str, LazyTensor]:
    """Return the tensors with the names and the order of rows of transformers.

    Tensors with other names keep their names.

    Raises:
        CheckpointError: the architecture is not known, or heads do not divide the rows of a tensor.
    """
    family = family_of(metadata, file)
    found = {}
    for name, tensor in tensors.items():
        # The config holds the frequencies.
        if name != _ROPE_FREQS:
            found[_new_name(name, family)] = _converted(name, tensor, family, metadata)
    return found


def _new_name(name: str, family: GgufFamily) -> str:
    """Return the name in transformers. ``"blk.0.attn_q.weight"`` gives one of ``q_proj``."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    inner = {**_INNER, **dict(family.norms)}
    if family.architecture == "Phi3ForCausalLM":
        # Gate and up are one tensor in Phi-3.
        inner["ffn_up"] = "mlp.gate_up_proj"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if not found or found[2] not in inner:
        return name
    return f"model.layers.{found[1]}.{inner[found[2]]}.{kind}"


def _converted(
    name: str, tensor: LazyTensor, family: GgufFamily, metadata: Mapping[str, Any]
) -> LazyTensor:
    """Return a tensor with the numbers and the order of rows in transformers."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    # The norms of Gemma add 1 themselves.
    if family.norm_offset and part.endswith("norm"):
        return LazyTensor(_ShiftedTensor(tensor))
    if not family.permuted or part not in ("attn_q", "attn_k"):
        return tensor
    given = _settings_of_architecture(metadata)
    heads = given.get("attention.head_count")
    if part == "attn_k":
        heads = given.get("attention.head_count_kv", heads)
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"tensor {name!r:.200} has {tensor.shape[0]} rows, which {heads!r:.50} heads do not "
            "divide"
        )
    return LazyTensor(_PermutedTensor(tensor, heads))


class _ShiftedTensor(StoredTensor):
    """A tensor that llama.cpp has added 1 to."""

    def __init__(self, tensor: LazyTensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    def read(self, bounds: Bounds) -> torch.Tensor:
        return self._tensor[tuple(slice(one.start, one.stop) for one in bounds)] - 1


class _PermutedTensor(StoredTensor):
    """A tensor with rows that alternate between the halves of each head.

    With heads of ``d`` rows, row ``2 * i + half`` of a head in the file is row ``half * d / 2 + i``
    here.
    """

    def __init__(self, tensor: LazyTensor, heads: int) -> None:
        super().__init__(tensor.shape, tensor.dtype, tensor.quantization)
        self._tensor = tensor
        self._heads = heads

    def blocks(self) -> StoredTensor:
        return _PermutedTensor(self._tensor.blocks(), self._heads)

    def read(self, bounds: Bounds) -> torch.Tensor:
        """Read the heads with rows of the bounds, put their rows in order, and keep these rows."""
        size = self.shape[0] // self._heads
        rows = bounds[0]
        first = rows.start // size * size
        end = -(-rows.stop // size) * size
        others = [slice(one.start, one.stop) for one in bounds[1:]]
        index = (slice(first, end), *others)
        stored = self._tensor[index]
        shape = stored.shape
        pairs = stored.reshape((end - first) // size, size // 2, 2, *shape[1:])
        whole = pairs.transpose(1, 2).reshape(shape)
        return whole[rows.start - first : rows.stop - first]
