"""The sizes and switches of a decoder, read from its config and from the data of its family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opgraft.errors import ModelError
from opgraft.models.decoder_experts import ExpertsFamily, ExpertsShape
from opgraft.models.deepseek_experts import RoutedShape
from opgraft.models.given import LARGEST_SIZE, GivenSettings
from opgraft.ops.moe.fused.placement import ALONE, ExpertSharing

ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "gelu": "gelu",
        # Both approximate by a hyperbolic tangent.
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
    }
)
"""Gated activation in configs → the name of the op."""


GRANITE_SCALES = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
"""Settings of Granite."""

GEMMA_SCALES = frozenset(
    {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
)
"""Settings of Gemma 2 and 3."""

PARTIAL_ROPE = "partial_rotary_factor"
"""The share of a head that a rope rotates."""

_FACTORS = frozenset({"embedding_multiplier", "residual_multiplier", "logits_scaling"})
"""Settings that change nothing if they are 1. A multiplier of scores replaces the usual one."""


@dataclass(frozen=True)
class DecoderFamily:
    """The differences between a family of decoders and Llama, as far as configs do not tell them.

    Attributes:
        before_attention: name of the norm of attention's input; ``None`` for no norm.
        after_attention: name of the norm of attention's output, likewise.
        before_mlp: name of the norm of the feed-forward layer's input, likewise.
        after_mlp: name of the norm of the feed-forward layer's output, likewise.
        gemma_norm: norms scale by one plus their weight.
        qk_norm: ``"head"``: each head of query and key is normalised, all by one weight;
            ``"each"``: each head by a weight of its own; ``"whole"``: all heads at once; or ``""``.
        qkv_bias: query, key and value have a bias; ``None``: as ``attention_bias`` says.
        output_bias: attention's output projection has a bias; ``None``: as ``attention_bias`` says.
        scaled_embedding: embeddings are scaled by the root of the hidden size.
        windowed: without ``layer_types``, a ``sliding_window`` holds for all layers. Configs of
            other families have the setting left over from another architecture, and ignore it.
        sinks: attention has one more score per head, with a share of the softmax.
        experts: the experts of the feed-forward layers; ``None`` for dense layers.
        latent: attention is multi-head latent attention, and layers may have DeepSeek's experts.
        reads: the settings of scales, caps and partial ropes that have an effect. Another one of
            these in a config is an error, because models of the family go on without it.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    gemma_norm: bool = False
    qk_norm: str = ""
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    scaled_embedding: bool = False
    windowed: bool = False
    sinks: bool = False
    experts: ExpertsFamily | None = None
    latent: bool = False
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LayerShape:
    """The differences between layers of one decoder: the window of attention, and the rope."""

    sliding_window: int | None
    rope: str
    """A key of ``DecoderShape.ropes``."""


@dataclass(frozen=True)
class LatentShape:
    """The sizes of latent attention, by the names in configs.

    Attributes:
        q_lora_rank: elements of the latent of a query; ``None`` if queries have no latents.
        kv_lora_rank: elements of the latent of key and value.
        qk_nope_head_dim: elements of a head without rope.
        qk_rope_head_dim: elements of a head with rope.
        v_head_dim: elements of a head of the value.
        interleaved: the rope pairs even elements with odd ones.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool


@dataclass(frozen=True)
class DecoderShape:
    """The sizes, switches and scales of a decoder, by our names.

    ``max_position`` is the longest context that is served. ``model_positions`` is the longest
    context by the config; ropes scale from that one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    model_positions: int
    eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    embedding_scale: float
    residual_scale: float
    attention_scale: float
    attention_soft_cap: float | None
    logits_scale: float
    logits_soft_cap: float | None
    ropes: Mapping[str, Mapping[str, Any]]
    layers: tuple[LayerShape, ...]
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    routed: RoutedShape | None = None
    sharing: ExpertSharing = ALONE

    @classmethod
    def of(
        cls, config: Any, family: DecoderFamily, max_position: int | None = None, **others: Any
    ) -> DecoderShape:
        """Read a config of ``transformers``.

        Args:
            config: the config of a decoder.
            family: the family of the decoder.
            max_position: the longest context, if other than the config's.
            **others: settings that replace those of the config, for a config with other names.

        Raises:
            ModelError: the config lacks a size, contradicts itself, or describes a decoder that
                opgraft does not have.
        """
        given = GivenSettings(config, **others)
        heads = given.size("num_attention_heads")
        hidden = given.size("hidden_size")
        # Without this setting, each query head has a key head of its own.
        kv_heads = given.size("num_key_value_heads", heads)
        head_size = _head_size(given, hidden, heads, kv_heads)
        longest = _longest(given, max_position)
        bias = bool(given("attention_bias", False))
        layers, ropes = _layers(given, family)
        # A setting that is not followed would give wrong answers without an error.
        _expect_written(given)
        _expect_read(given, family, ropes)
        # Layers with latents have another scale, and other experts.
        latent = _latent(given) if family.latent else None
        routed = RoutedShape.of(given) if family.latent else None
        experts = ExpertsShape.of(given, family.experts) if family.experts is not None else None
        return cls(
            vocab_size=given.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=given.size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            max_position=longest,
            # Ropes scale from the trained context, also if a shorter context is served.
            model_positions=given("max_position_embeddings", longest),
            eps=given.epsilon("rms_norm_eps"),
            activation=_activation(given),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=bool(given("mlp_bias", False)),
            tied=bool(given("tie_word_embeddings", False)),
            embedding_scale=_embedding_scale(given, family, hidden),
            residual_scale=given("residual_multiplier", 1.0),
            attention_scale=_scale_of_scores(given, head_size, latent, ropes),
            attention_soft_cap=_positive(given, "attn_logit_softcapping"),
            logits_scale=1.0 / (_positive(given, "logits_scaling") or 1.0),
            logits_soft_cap=_positive(given, "final_logit_softcapping"),
            ropes=ropes,
            layers=layers,
            experts=experts,
            latent=latent,
            routed=routed,
        )


def _expect_written(given: GivenSettings) -> None:
    """Refuse settings that no decoder of opgraft follows.

    Raises:
        ModelError: the config has such a setting.
    """
    if given("use_bidirectional_attention", False):
        raise ModelError(
            f"{given.name}: use_bidirectional_attention is set, and decoders attend causally only"
        )
    if not given("is_causal", True):
        raise ModelError(
            f"{given.name}: is_causal is set to false, and decoders attend causally only"
        )
    if given("clip_qkv", None) is not None:
        raise ModelError(
            f"{given.name}: clip_qkv is set, and queries, keys and values are not clipped here"
        )


def _expect_read(
    given: GivenSettings, family: DecoderFamily, ropes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse settings that models of the family go on without.

    Raises:
        ModelError: the config has such a setting, with an effect in another family.
    """
    found = {name: given(name, None) for name in GRANITE_SCALES | GEMMA_SCALES}
    # A latent head is rotated in a part of its own.
    if not family.latent:
        for rope in ropes.values():
            share = rope.get(PARTIAL_ROPE)
            if share not in (None, 1):
                found[PARTIAL_ROPE] = share
                break
    for name, value in sorted(found.items()):
        # A factor of 1 changes nothing. For the others, 1 is a number like any other.
        neutral = (None, 1) if name in _FACTORS or name == PARTIAL_ROPE else (None,)
        if name in family.reads or value in neutral:
            continue
        raise ModelError(
            f"{given.name}: {name} is {value!r:.40}, which models of this family do not read: take "
            "it out of the config, or name the architecture that has it"
        )


def _head_size(given: GivenSettings, hidden: int, heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise ModelError(
            f"{given.name}: num_attention_heads is {heads}, which num_key_value_heads, "
            f"{kv_heads}, does not divide"
        )
    # With a head size in the config, heads need not fill the hidden size: Gemma's are wider.
    if given("head_dim", None) is None and hidden % heads:
        raise ModelError(
            f"{given.name}: hidden_size is {hidden}, which num_attention_heads, {heads}, "
            "does not divide"
        )
    return given.size("head_dim", hidden // heads)


def _longest(given: GivenSettings, max_position: int | None) -> int:
    if max_position is None:
        max_position = given("max_position_embeddings")
    # Not isinstance: True is an integer in Python.
    if type(max_position) is not int or not 1 <= max_position <= LARGEST_SIZE:
        raise ModelError(
            f"{given.name}: a context of {max_position!r:.40} tokens (max_position_embeddings, or "
            f"model.max_model_len where that is set), expected 1 to {LARGEST_SIZE}: set "
            "model.max_model_len to the longest that you need"
        )
    return max_position


def _positive(given: GivenSettings, name: str) -> float | None:
    """Return a number above 0, or None if the config has none.

    Raises:
        ModelError: the value is no such number.
    """
    value = given(name, None)
    if value is None:
        return None
    # transformers divides by a cap of 0. In GGUF files, 0 means no cap, and becomes None there.
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"{given.name}: {name} is {value!r:.40}, expected a number above 0")
    return float(value)


def _activation(given: GivenSettings) -> str:
    # Gemma's configs have both names, and the second one is wrong there.
    name = given("hidden_activation", None) or given("hidden_act")
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{given.name}: the activation {name!r} is none of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _layers(
    given: GivenSettings, family: DecoderFamily
) -> tuple[tuple[LayerShape, ...], Mapping[str, Mapping[str, Any]]]:
    """Return each layer's window and rope, and the parameters of the ropes.

    All layers share the rope ``""``, unless the config has one for each kind of layers.
    """
    kinds = _kinds_of_layers(given, family)
    ropes = _ropes(given, kinds)
    layers = []
    for kind in kinds:
        window = given.size("sliding_window") if kind == "sliding_attention" else None
        rope = kind if kind in ropes else ""
        layers.append(LayerShape(window, rope))
    return tuple(layers), ropes


def _kinds_of_layers(given: GivenSettings, family: DecoderFamily) -> Sequence[str]:
    count = given.size("num_hidden_layers")
    windowed = family.windowed and given("sliding_window", None)
    usual = "sliding_attention" if windowed else "full_attention"
    kinds: Sequence[str] = given("layer_types", None) or [usual] * count
    if len(kinds) != count or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelError(
            f"{given.name}: layer_types has {len(kinds)} entries of "
            f"{', '.join(sorted(set(kinds)))}, expected {count} of full_attention and "
            "sliding_attention"
        )
    return kinds


def _ropes(given: GivenSettings, kinds: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the parameters of ropes by the kind of layer; by ``""`` for all layers."""
    parameters = given("rope_parameters", None) or {
        "rope_type": "default",
        "rope_theta": given("rope_theta", 10000.0),
    }
    by_kind = {"": parameters}
    # {"full_attention": {...}, "sliding_attention": {...}} has a rope for each kind.
    if all(isinstance(parameters.get(kind), Mapping) for kind in kinds):
        by_kind = parameters
    if by_kind is parameters and given("layer_types", None) is None:
        raise ModelError(
            f"{given.name}: rope_parameters has a rope for each kind of layer, and layer_types is "
            "missing: give the kinds of the layers, or one rope for all"
        )
    # Phi-3 has the trained context beside the parameters; other families have it among them.
    trained = given("original_max_position_embeddings", None)
    extra = {} if trained is None else {"original_max_position_embeddings": trained}
    ropes = {}
    for kind, rope in by_kind.items():
        # Settings that hold for all kinds may stand beside the kinds.
        if isinstance(rope, Mapping):
            ropes[kind] = {**extra, **rope}
    return ropes


def _embedding_scale(given: GivenSettings, family: DecoderFamily, hidden: int) -> Any:
    # Configs of Gemma have no setting for this scale.
    if family.scaled_embedding:
        return hidden**0.5
    return given("embedding_multiplier", 1.0)


def _scale_of_scores(
    given: GivenSettings,
    head_size: int,
    latent: LatentShape | None,
    ropes: Mapping[str, Mapping[str, Any]],
) -> float:
    if latent is not None:
        return _latent_scale(latent, ropes)
    return _attention_scale(given, head_size)


def _attention_scale(given: GivenSettings, head_size: int) -> float:
    # The first is Gemma's name, for the number below the root. Granite names the scale itself.
    size = _positive(given, "query_pre_attn_scalar") or head_size
    return _positive(given, "attention_multiplier") or float(size**-0.5)


def _latent(given: GivenSettings) -> LatentShape:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: given.size(name) for name in names}
    rank = None if given("q_lora_rank", None) is None else given.size("q_lora_rank")
    return LatentShape(q_lora_rank=rank, interleaved=bool(given("rope_interleave", True)), **sizes)


def _latent_scale(latent: LatentShape, ropes: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the scale of scores.

    YaRN's scale of all dimensions counts twice, once for the query and once for the key.
    """
    scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    # Layers with latents are all of one kind, so they share one rope.
    (rope,) = ropes.values()
    share = rope.get("mscale_all_dim")
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not share or factor <= 1.0:
        return float(scale)
    yarn_scale = 0.1 * share * math.log(factor) + 1.0
    return float(scale * yarn_scale**2)
