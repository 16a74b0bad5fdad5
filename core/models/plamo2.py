"""PLaMo 2: special mixers, attention in some layers, and norms before and after each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError
from opgraft.models.decoder import DecoderAttention, rope_of
from opgraft.models.decoder_config import DecoderFamily, DecoderShape
from opgraft.models.decoder_mlp import DecoderMLP
from opgraft.models.given import GivenSettings
from opgraft.models.hybrid import HybridForCausalLM, HybridLayer, normalised
from opgraft.models.names import ShardId, WeightsMapper
from opgraft.ops.layernorm import RMSNorm
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.state_space import Plamo2MambaMixer
from opgraft.ops.weights import LoadedTensor, copy_weight, set_weight_attrs
from torch import Tensor, nn

AFTER_MIXER = 1 / 5
"""Offset of the weight of the norm after the mixer. Norms before the parts have the offset 1."""

AFTER_MLP = 1 / 5**1.5
"""Offset of the weight of the norm after the feed-forward layer."""


class Plamo2Layer(HybridLayer):
    """One layer with a norm before and after each part."""

    mlp: nn.Module

    def __init__(self, mixer: nn.Module, mlp: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__(mixer, mlp, hidden_size, eps)
        self.after_mixer = RMSNorm(hidden_size, eps=eps)
        self.after_mlp = RMSNorm(hidden_size, eps=eps)
        # Added once on loading, so that a plain norm computes each call.
        _shift(self.mixer_norm, 1.0)
        _shift(self.mlp_norm, 1.0)
        _shift(self.after_mixer, AFTER_MIXER)
        _shift(self.after_mlp, AFTER_MLP)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the feed-forward layer, and the residual stream without that output.

        Args:
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            residual: ``[tokens, hidden_size]``, ``None`` before the first layer.
        """
        hidden_states, residual = normalised(self.mixer_norm, hidden_states, residual)
        mixed = self.after_mixer(self.mixed(positions, hidden_states))
        hidden_states, residual = normalised(self.mlp_norm, mixed, residual)
        return self.after_mlp(self.mlp(hidden_states)), residual


def _shift(norm: RMSNorm, offset: float) -> None:
    """Set the loader of a norm's weight: a checkpoint has the weight minus ``offset``."""

    def load(param: Tensor, loaded: LoadedTensor) -> None:
        copy_weight(param.data, loaded, "the weight of a norm")
        param.data.add_(offset)

    set_weight_attrs(norm.weight, {"weight_loader": load})


def _by_heads(load: Callable[..., None], heads: int) -> Callable[..., None]:
    """Return a loader for a weight with the rows of gate and input of each head in turn.

    The loader gives ``load`` all gates first and then all inputs.
    """

    def load_by_heads(param: Any, loaded: LoadedTensor) -> None:
        dim = getattr(param, "output_dim", None)
        # Scales of a whole weight have no rows.
        if dim is None or not len(loaded.shape):
            return load(param, loaded)
        by_head = loaded[...].unflatten(dim, (heads, 2, -1))  # type: ignore[no-untyped-call]
        # [heads, 2, size] becomes [2, heads, size].
        by_kind = by_head.transpose(dim, dim + 1)
        return load(param, by_kind.flatten(dim, dim + 2))

    return load_by_heads


@PluggableClass.register("Plamo2ForCausalLM")
class Plamo2ForCausalLM(HybridForCausalLM):
    """PLaMo 2 (arXiv:2509.04897). Settings and tensors have the names of its checkpoints."""

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = {}
    embedding_weight: ClassVar[str] = "model.embed_tokens.weight"
    weights_mapper = WeightsMapper(
        prefixes={"model.layers.layers.": "model.layers."},
        substrings={
            ".pre_mixer_norm.": ".mixer_norm.",
            ".post_mixer_norm.": ".after_mixer.",
            ".pre_mlp_norm.": ".mlp_norm.",
            ".post_mlp_norm.": ".after_mlp.",
            ".A_log": ".A",
        },
        suffixes={
            f".{kind}{end}": f".{kind}_norm.weight"
            for end, kinds in (("_norm_weight", ("B", "C", "dt")), ("_weight", ("q", "k")))
            for kind in kinds
        },
        base="model",
    )

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        if self.stage.is_last:
            _shift(self.model.norm, 1.0)

    def make_layers(
        self, config: Any, quant_config: QuantizationConfig | None, prefix: str
    ) -> tuple[list[HybridLayer], float]:
        """Return the layers. One layer of ``mamba_step`` attends.

        Raises:
            ModelError: the config describes experts or other mixers.
        """
        _expect_sizes(config)
        family = DecoderFamily(qk_norm="each")
        longest = self.opgraft_config.model.max_model_len
        shape = DecoderShape.of(config, family, longest, **_settings_of_decoder(config))
        self.max_position = shape.max_position
        [rope] = [rope_of(shape, parameters) for parameters in shape.ropes.values()]
        layers: list[HybridLayer] = []
        for number in self.stage.layers:
            path = f"{prefix}.{number}"
            mixer: nn.Module
            if attends(config, number):
                mixer = DecoderAttention(shape, family, number, rope, quant_config, f"{path}.mixer")
            else:
                mixer = _mixer(config, quant_config, f"{path}.mixer")
            mlp = DecoderMLP(shape, quant_config, f"{path}.mlp")
            layers.append(Plamo2Layer(mixer, mlp, shape.hidden_size, shape.eps))
        return layers, shape.eps


def _mixer(config: Any, quant_config: QuantizationConfig | None, prefix: str) -> Plamo2MambaMixer:
    """Make a mixer with a state."""
    # The mixer has the signature of vLLM's, and reads these two attributes.
    given = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config), quant_config=quant_config
    )
    mixer = Plamo2MambaMixer(given, prefix=prefix)
    parameter: Any
    for parameter in mixer.in_proj.parameters():
        parameter.weight_loader = _by_heads(parameter.weight_loader, config.mamba_num_heads)
    return mixer


def attends(config: Any, layer: int) -> bool:
    """Return True if a layer attends: the middle one of each ``mamba_step`` layers.

    Of few layers, the last one attends.
    """
    if not config.mamba_enabled:
        return True
    middle = config.mamba_step // 2
    if config.num_hidden_layers <= middle:
        return bool(layer == config.num_hidden_layers - 1)
    return bool(layer % config.mamba_step == middle)


def _expect_sizes(config: Any) -> None:
    given = GivenSettings(config)
    for name in ("mamba_num_heads", "mamba_d_state", "mamba_d_conv", "attention_window_size"):
        given.size(name)
    experts = getattr(config, "n_expert", None)
    if experts or config.mamba_step < 2:
        raise ModelError(
            f"PLaMo 2: n_expert is {experts!r:.40} and mamba_step {config.mamba_step!r:.40}, "
            "expected no experts and a step of at least 2: other models of this type are not "
            "written here"
        )


def _settings_of_decoder(config: Any) -> dict[str, Any]:
    """Return the settings by the names in configs of decoders."""
    kinds = []
    for number in range(config.num_hidden_layers):
        is_whole = number in config.full_attention_idx
        kinds.append("full_attention" if is_whole else "sliding_attention")
    return {
        "head_dim": config.hidden_size_per_head,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        # PLaMo counts the tokens before a token. Decoders count the token itself, too.
        "sliding_window": config.attention_window_size + 1,
        "layer_types": kinds,
    }
