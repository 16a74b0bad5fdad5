"""GGUF files as checkpoints of transformers: names, order of rows and offsets of the tensors, and the configuration.

Files are written by ``convert_hf_to_gguf.py`` of llama.cpp; each table here undoes a step of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.errors import CheckpointError, close_matches
from opgraft.models.lazy import Bounds, LazyTensor, StoredTensor


@dataclass(frozen=True)
class Family:
    """One architecture of GGUF, in the terms of transformers.

    Attributes:
        model_type: the configuration of transformers.
        architecture: the class of the model.
        permuted: the rows of queries and keys were reordered within each head, for rotation of neighbouring pairs.
        norm_offset: 1 was added to the weights of norms.
        norms: the norms of a layer by their names in GGUF.
    """

    model_type: str
    architecture: str
    permuted: bool = False
    norm_offset: bool = False
    norms: tuple[tuple[str, str], ...] = (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))


_SANDWICH = (
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_POST = (("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm"))

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "phi3": Family("phi3", "Phi3ForCausalLM"),
    "gemma": Family("gemma", "GemmaForCausalLM", norm_offset=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", norm_offset=True, norms=_SANDWICH),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", norm_offset=True, norms=_SANDWICH),
    "granite": Family("granite", "GraniteForCausalLM", permuted=True),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", norms=_POST),
}
"""By ``general.architecture``. Mistral and SmolLM are llama there."""

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
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def family_of(metadata: Mapping[str, Any], file: object) -> Family:
    """Return the family that a file names.

    Raises:
        CheckpointError: it is not known.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{file} has the architecture {name!r:.80}, which is not known here: "
            f"{close_matches(str(name)[:80], FAMILIES)} Take the checkpoint as safetensors instead."
        )
    return FAMILIES[name]


def config_values(metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor], file: object) -> dict[str, Any]:
    """Return the settings of a file by their names in ``config.json``.

    Raises:
        CheckpointError: the architecture is not known, or a setting is no number.
    """
    family = family_of(metadata, file)
    prefix = metadata["general.architecture"]
    keys = {f"{prefix}.{key}": name for key, name in _CONFIG.items()} | _TOKENS
    found = {name: metadata[key] for key, name in keys.items() if key in metadata}
    wrong = [f"{name} is {value!r:.50}" for name, value in found.items() if type(value) not in (int, float)]
    if wrong:
        raise CheckpointError.listing(f"{file} has settings that are no numbers", wrong, "take another file")
    if "vocab_size" not in found and "tokenizer.ggml.tokens" in metadata:
        found["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    values = {"model_type": family.model_type, "architectures": [family.architecture], **found}
    values["tie_word_embeddings"] = "output.weight" not in tensors
    return values | _rope(metadata, prefix) | _biases(metadata, tensors)


def _rope(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the scaling of positions, where the file has one that is a setting and not a tensor."""
    keys = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind not in ("linear", "yarn"):
        return {}
    found = {name: metadata.get(f"{prefix}.rope.scaling.{key}") for key, name in keys.items()}
    return {"rope_scaling": {"rope_type": kind, **{name: value for name, value in found.items() if value is not None}}}


def _biases(metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the biases of a llama, which the metadata does not tell of."""
    if metadata["general.architecture"] != "llama":
        return {}
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


def renamed(metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor], file: object) -> dict[str, LazyTensor]:
    """Return the tensors under the names of transformers, rows in its order. Names that are not known stay.

    Raises:
        CheckpointError: the architecture is not known.
    """
    family = family_of(metadata, file)
    return {_name(name, family): _converted(name, tensor, family, metadata) for name, tensor in tensors.items()}


def _name(name: str, family: Family) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    inner = {**_INNER, **dict(family.norms)}
    if family.architecture == "Phi3ForCausalLM":
        inner["ffn_up"] = "mlp.gate_up_proj"
    return f"model.layers.{found[1]}.{inner[found[2]]}.{kind}" if found and found[2] in inner else name


def _converted(name: str, tensor: LazyTensor, family: Family, metadata: Mapping[str, Any]) -> LazyTensor:
    part = name.rpartition(".")[0].rpartition(".")[2]
    if family.norm_offset and part.endswith("norm"):
        return LazyTensor(_Shifted(tensor))
    if family.permuted and part in ("attn_q", "attn_k"):
        heads = metadata.get(f"{metadata['general.architecture']}.attention.head_count")
        if part == "attn_k":
            heads = metadata.get(f"{metadata['general.architecture']}.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"tensor {name!r:.200} has {tensor.shape[0]} rows, which {heads!r:.50} heads do not divide"
            )
        return LazyTensor(_Permuted(tensor, heads))
    return tensor


class _Shifted(StoredTensor):
    """A tensor to which 1 was added when it was written."""

    def __init__(self, tensor: LazyTensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    def read(self, bounds: Bounds) -> torch.Tensor:
        return self._tensor[tuple(slice(one.start, one.stop) for one in bounds)] - 1


class _Permuted(StoredTensor):
    """A tensor whose rows alternate between the halves of each head.

    Row ``2 * i + half`` of a head in the file is row ``half * d / 2 + i`` here, for heads of ``d`` rows.
    """

    def __init__(self, tensor: LazyTensor, heads: int) -> None:
        super().__init__(tensor.shape, tensor.dtype, tensor.quantization)
        self._tensor, self._heads = tensor, heads

    def blocks(self) -> StoredTensor:
        return _Permuted(self._tensor.blocks(), self._heads)

    def read(self, bounds: Bounds) -> torch.Tensor:
        """Read the heads that the rows belong to, a head at a time, and put their rows in order."""
        size = self.shape[0] // self._heads
        rows, others = bounds[0], tuple(slice(one.start, one.stop) for one in bounds[1:])
        heads = range(rows.start // size, -(-rows.stop // size))
        parts = []
        for head in heads:
            index = (slice(head * size, (head + 1) * size), *others)
            halves = self._tensor[index].reshape(size // 2, 2, -1).transpose(0, 1)
            whole = halves.reshape([size, *map(len, bounds[1:])])
            parts.append(whole[max(0, rows.start - head * size) : rows.stop - head * size])
        return torch.cat(parts) if parts else torch.empty(tuple(map(len, bounds)), dtype=self.dtype)
