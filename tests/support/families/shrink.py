"""Tiny configurations of any model of transformers, by the names that its configurations give to sizes.

There is no list of models here. A default configuration is built, each of its numbers is replaced by a small one where
its name says that it is a number of layers, of heads, a width or the like, and the class is called with those.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

WIDTH = 32
HEADS = 4
HEAD = WIDTH // HEADS
VOCABULARY = 128

_KEY_VALUE_HEADS = re.compile("key_value_heads|kv_heads|num_kv|query_groups|head_kv")

# The first pattern that is found in a name decides; ``None`` keeps the default.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (
        r"kernel|stride|dilation|padding|(^|_)patch|tubelet|labels|(in|out|input|num|image|audio)_channels$",
        None,
    ),
    (r"window|chunk|merge|expand|temporal|scale|ratio|sparsity|drop|freq|pad_|_id$|_index$", None),
    (r"n_fft|hop|sampling_rate|prenet_layers|postnet_layers", None),
    (r"(nextn|mtp).*layers|skip|anyres|n_codes_given|max_source", None),
    (r"first_k_dense|num_dense_layers", 1),
    (r"shared_experts$|n_group$|topk_group$|n_groups$|(^|_)groups$", 1),
    (r"(per_tok|_top_?k|^top_?k|moe_k)$", 2),
    (r"experts$", HEADS),
    (_KEY_VALUE_HEADS.pattern, 2),
    (r"(mamba|ssm).*heads$", 2 * HEADS),
    (r"(heads|n_head)$", HEADS),
    (r"(rope|nope|qk|v|kv)_head_dim$|head_dim$|head_size$|d_head$|d_kv$|rotary_dim$", HEAD),
    (r"lora_(rank|dim)|lora_r$", HEAD),
    (r"(layers?|blocks|depth|n_layer|stacks)$", 2),
    (r"num_mel|mel_bins|feature_size|num_mels", None),
    (r"vocab_size|codebook_size|num_embeddings|n_codes$", VOCABULARY),
    (r"max_.*position|n_positions|max_.*len|n_ctx|seq_length|max_seq|block_size", 64),
    (r"num_queries|query_tokens|num_latents|num_proposals", 8),
    (r"intermediate|ffn|d_ff|n_inner|mlp_(size|dim)|feedforward", 2 * WIDTH),
    (r"state_size|d_state|ssm_state", HEAD),
    (
        r"(size|dim|dims|width|channels|d_model|n_embd|embed|hidden|rank|features)$|^dim|_dim_|d_inner|units",
        WIDTH,
    ),
)
# What some configurations leave open and then compute with.
_FILLED = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD,
    "num_key_value_heads": 2,
    "prediction_length": 4,
}
_DEPTHS = re.compile(r"depth|layers|blocks|repeats")
_WIDTHS = re.compile(r"size|dim|channel|width|embed|filters")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to shrink: the names that it is for, the number of heads of keys and values, and of layers."""

    names: re.Pattern[str] = re.compile("")
    key_value_heads: int = 2
    layers: int = 2


# Tried in this order: some models ask for relations between sizes that no name tells.
WAYS = (
    Way(),
    Way(key_value_heads=HEADS),
    Way(layers=8),
    Way(re.compile(r"layers?$|blocks|depth|vocab|max_|image_size")),
)


def tiny(cls: type[PreTrainedConfig], way: Way = WAYS[0]) -> PreTrainedConfig:
    """A configuration of ``cls`` with small numbers where ``way`` finds their names, in its parts too."""
    default = cls()
    names = (
        {f.name for f in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls)
        else set(vars(default))
    )
    own = {f.name for f in dataclasses.fields(PreTrainedConfig)} - {"vocab_size"}
    sizes: dict[str, Any] = {}
    for name in sorted(names - own - {"sub_configs"}):
        value, declared = _read(default, name), getattr(cls, name, None)
        if value is None and name in _FILLED:
            sizes[name] = way.key_value_heads if _KEY_VALUE_HEADS.search(name) else _FILLED[name]
        elif isinstance(value, PreTrainedConfig):
            sizes[name] = tiny(type(value), way)
        elif declared is None and not isinstance(value, int) and not isinstance(value, Mapping):
            continue  # computed from others, such as the kinds of layers
        else:
            small = _shrunk(name, value) if way.names.search(name) else value
            if small == 2 and name in ("num_hidden_layers", "num_layers", "n_layer"):
                small = way.layers
            if small == 2 and _KEY_VALUE_HEADS.search(name):
                small = way.key_value_heads
            if small != value or declared is not None:
                sizes[name] = small
    kinds = list(dict.fromkeys(_read(default, "layer_types") or ()))
    if (
        "layer_types" in names and "num_hidden_layers" in names and len(kinds) > 1
    ):  # one layer of each kind
        sizes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    if "expand" in names and "num_heads" in sizes:
        sizes["num_heads"] = int(default.expand) * HEADS
    if isinstance(sizes.get("patch_size"), int) and isinstance(sizes.get("image_size"), int):
        sizes["image_size"] = 4 * sizes["patch_size"]
    return cls(**{**sizes, **_token_ids(default, names)})


def _read(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # what differs from layer to layer
        return None


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, bool) or name == "image_size":
        return 64 if name == "image_size" and isinstance(value, int) else value
    if isinstance(value, int):
        small = next((small for pattern, small in _SIZES if re.search(pattern, name)), None)
        return value if small is None else min(value, small)
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return type(value)(_shrunk_list(name, value))
    if isinstance(value, Mapping) and "mrope_section" in value:
        return {**value, "mrope_section": [HEAD // 2 - 2, 1, 1]}
    return value


def _shrunk_list(name: str, values: Any) -> list[int]:
    if re.search(r"heads$", name):
        return [min(v, 2) for v in values]
    if _DEPTHS.search(name):
        return [min(v, 1) for v in values]
    if (
        _WIDTHS.search(name)
        and min(values) >= WIDTH // 2
        and not re.search("image|kernel|patch|window|input", name)
    ):
        return [max(1, v * (WIDTH // 2) // min(values)) for v in values]
    return list(values)


def _token_ids(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Special tokens inside the small vocabulary, each its own number, above those of ordinary tokens."""
    special = [
        n
        for n in sorted(names | set(vars(default)))
        if re.search(r"token_(id|index)$|_id$", n) and type(_read(default, n)) is int
    ]
    found = {name: getattr(default, name) for name in special}
    number = {
        value: VOCABULARY - 1 - i
        for i, value in enumerate(sorted({v for v in found.values() if v >= VOCABULARY - 64}))
    }
    return {name: number.get(value, value) for name, value in found.items() if value in number}
