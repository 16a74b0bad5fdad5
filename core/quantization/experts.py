"""Weights of experts in the quantizations of linear layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opgraft.errors import QuantizationError
from opgraft.ops.linear import MergedColumnParallelLinear, RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized.functional import expand_weight_scale
from opgraft.ops.linear.quantized.storage import MIDDLE
from opgraft.ops.moe.fused.loading import ExpertLoader, Part
from opgraft.ops.moe.quantized.methods import ExpertWeights
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from opgraft.quantization.online import OnlineLinearMethod, put
from torch import Tensor, nn

Codes = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and offsets of one expert's matrix."""


class OnlineExperts(ExpertWeights):
    """Plain weights of a checkpoint. Complete weights of an expert are quantized and released.

    Args:
        method: quantizes a matrix.
    """

    def __init__(self, method: OnlineLinearMethod) -> None:
        self.method = method

    def create(self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype) -> None:
        experts, hidden, intermediate = sizes
        device = torch.get_default_device()
        shapes = {"w13": (experts, 2 * intermediate, hidden), "w2": (experts, hidden, intermediate)}
        for name, shape in shapes.items():
            self.method.expect_fits(f"{layer.prefix} ({name})", shape[2])
            # Plain weights of all experts may not fit into the memory.
            empty = torch.empty(shape, dtype=params_dtype, device="meta")
            weight = nn.Parameter(empty, requires_grad=False)
            loading = _QuantizingLoader(self.method, layer.loader, f"{name}_weight", device)
            set_weight_attrs(weight, {"weight_loader": loading})
            layer.register_parameter(f"{name}_weight", weight)

    def finish(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            loader = layer._parameters[f"{name}_weight"].weight_loader
            put(layer, stacked(name, loader.finished()))


class _QuantizingLoader:
    """Loads a plain parameter of all experts, and quantizes each expert's complete matrix.

    Attributes:
        plain: place of an expert → plain matrix ``[1, rows, columns]``, and the loaded parts.
        made: place of an expert → codes.
    """

    def __init__(
        self, method: OnlineLinearMethod, loader: ExpertLoader, name: str, device: torch.device
    ) -> None:
        self.method = method
        self.loader = loader
        self.name = name
        self.device = device
        self.plain: dict[int, tuple[Tensor, set[str]]] = {}
        self.made: dict[int, Codes] = {}

    def __call__(self, param: Tensor, loaded: LoadedTensor, part: Part = None) -> None:
        for place, expert in enumerate(self.loader.experts):
            if part is None or part[0] == expert:
                self._load(place, param, loaded, part)

    def _load(self, place: int, param: Tensor, loaded: LoadedTensor, part: Part) -> None:
        if place not in self.plain:
            shape = (1, *param.shape[1:])
            self.plain[place] = (
                torch.empty(shape, dtype=param.dtype, device=self.device),
                set(),
            )
        plain, seen = self.plain[place]
        loader = dataclasses.replace(self.loader, experts=self.loader.experts[place : place + 1])
        loader.load(self.name, plain, loaded, part)
        if part is not None:
            seen.add(part[1])
        # w13 has two parts, gate and up.
        if part is None or part[1] == "w2" or len(seen) == 2:
            del self.plain[place]
            made: Any = self.method.quantize(plain[0])
            scales = made.get("scales", made.get("weight_scale"))
            self.made[place] = (made["weight"], scales, made.get("offsets"))

    def finished(self) -> list[Codes]:
        """Return the codes of all experts.

        Raises:
            QuantizationError: some experts were not loaded.
        """
        lacking = []
        for place, expert in enumerate(self.loader.experts):
            if place not in self.made:
                lacking.append(str(expert))
        if lacking:
            raise QuantizationError(
                f"{self.loader.what}: weights of the experts {', '.join(lacking[:10])}, which are "
                "quantized as they are loaded, were not loaded, or not all of them: load them by "
                "the parameter's weight_loader"
            )
        return [self.made.pop(place) for place in range(len(self.loader.experts))]


class CheckpointExperts(ExpertWeights):
    """Quantized weights of a checkpoint with the tensors of linear layers for each expert.

    While loading, each expert is two linear layers below the layer of experts.

    Args:
        config: makes the weight methods of linear layers.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config

    def create(self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype) -> None:
        if layer.loader.interleaved:
            raise QuantizationError(
                f"{layer.prefix}: its activation {layer.moe_config.activation} takes rows of gate "
                f"and up in turn, and {self.config.get_name()} is read for experts that have all "
                "of the gate first: take a checkpoint in another quantization"
            )
        if layer.moe_config.has_bias:
            raise QuantizationError(
                f"{layer.prefix}: its experts have biases, and {self.config.get_name()} is read "
                "for experts without: take a checkpoint in another quantization"
            )

        _, hidden, intermediate_of_rank = sizes
        # Linear layers take the sizes of all ranks.
        intermediate = intermediate_of_rank * layer.tp_size
        settings: dict[str, Any] = {
            "bias": False,
            "params_dtype": params_dtype,
            "quant_config": self.config,
            "return_bias": False,
            "disable_tp": layer.tp_size == 1,
        }
        # With redundant experts, a rank may have an expert twice.
        for expert in sorted(set(layer.local_experts)):
            path = expert_path(layer, expert)
            holder = nn.Module()
            holder.gate_up_proj = MergedColumnParallelLinear(
                hidden,
                [intermediate, intermediate],
                prefix=f"{path}.gate_up_proj",
                **settings,
            )
            holder.down_proj = RowParallelLinear(
                intermediate,
                hidden,
                reduce_results=False,
                prefix=f"{path}.down_proj",
                **settings,
            )
            layer.add_module(str(expert), holder)

    def finish(self, layer: Any) -> None:
        for name, projection in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            codes = {}
            for expert in layer.local_experts:
                linear = getattr(layer._modules[str(expert)], projection)
                codes[expert] = codes_of(linear)
            put(layer, stacked(name, [codes[expert] for expert in layer.local_experts]))
        for expert in set(layer.local_experts):
            del layer._modules[str(expert)]


def expert_path(layer: Any, expert: int) -> str:
    """Return the name of an expert in the checkpoint."""
    return f"{layer.prefix}.{expert}" if layer.prefix else str(expert)


def codes_of(layer: Any) -> Codes:
    """Return the codes of a linear layer, from a weight method.

    Raises:
        QuantizationError: the order of inputs differs between experts.
    """
    weight = layer.weight.data
    if getattr(layer, "input_order", None) is not None:
        raise QuantizationError(
            f"{layer.prefix}: its inputs are in groups by activation (desc_act), each expert's in "
            "an order of its own, which is not read for experts: take a checkpoint without"
        )

    scale = layer._parameters.get("weight_scale")
    if scale is None:
        offsets = None if layer.offsets is None else layer.offsets.data
        return weight, layer.scales.data, offsets
    block = layer.quant_method.scales.block
    by_row = block is None or block == (1, -1)
    if by_row:
        scales = expand_weight_scale("quantized_experts", scale.data, weight, None)
        return weight, scales.contiguous(), None
    scales = expand_weight_scale("quantized_experts", scale.data, weight, block)
    inputs = weight.shape[1]
    block_inputs = inputs if block[1] == -1 else block[1]
    # Groups must divide the inputs. The last block may be smaller than the others.
    width = math.gcd(inputs, block_inputs)
    return weight, scales[:, ::width].contiguous(), None


def stacked(name: str, experts: Sequence[Codes]) -> Mapping[str, Tensor | None]:
    """Return the parameters of a layer from the codes of each expert, some with offsets.

    Args:
        name: ``"w13"`` or ``"w2"``.
        experts: in the order of places.
    """
    codes, scales, offsets = zip(*experts, strict=True)
    all_offsets: Tensor | None = None
    if any(each is not None for each in offsets):
        all_offsets = torch.stack([_offsets_of(*expert) for expert in experts])
    return {
        f"{name}_weight": torch.stack(codes),
        f"{name}_scales": torch.stack(scales),
        f"{name}_offsets": all_offsets,
    }


def _offsets_of(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the offsets of an expert, also if its codes have none."""
    if offsets is not None:
        return offsets
    if codes.dtype == torch.uint8:
        return scales * -MIDDLE
    return torch.zeros_like(scales)
