"""Checkpoints of gpt-oss, with experts in MXFP4 (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.quantized.methods import ExpertWeights
from opgraft.ops.quantization.fp4 import MX_GROUP
from opgraft.ops.weights import LoadedTensor
from opgraft.quantization.checkpoint import (
    CheckpointConfig,
    create_parameter,
    expect_settings,
    not_converted,
)
from opgraft.quantization.online import put
from torch import Tensor


@PluggableClass.register("mxfp4")
class Mxfp4Config(CheckpointConfig):
    """Weights of experts in 4 bits, with a power of two for each 32 inputs.

    Other layers are plain.
    """

    def get_name(self) -> str:
        return "mxfp4"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from a checkpoint's list of plain layers.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        expect_settings("mxfp4", config)
        return cls(not_converted("mxfp4", config))

    def linear_method(self, prefix: str) -> QuantizeMethodBase | None:
        return None

    def expert_weights(self, layer: FusedMoE) -> ExpertWeights:
        return Mxfp4Experts()


class Mxfp4Experts(ExpertWeights):
    """Unchanged blocks and scales, in one parameter for all experts.

    A checkpoint has ``gate_up_proj_blocks`` ``[experts, 2 · intermediate, hidden / 32, 16]``,
    ``gate_up_proj_scales`` without the last dimension, and ``down_proj_…`` likewise, all in
    ``uint8``. A scale is ``2 ** (scale - 127)``.
    """

    def create(self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype) -> None:
        experts, hidden, intermediate = sizes
        for name, rows, inputs in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
            if inputs % MX_GROUP:
                raise QuantizationError(
                    f"{layer.prefix} has {inputs} inputs on this rank, which the checkpoint's "
                    f"blocks of {MX_GROUP} do not divide: take fewer tensor ranks, or have ranks "
                    "share experts (parallel.expert)"
                )
            shape = (experts, rows, inputs // MX_GROUP)
            source = "gate_up_proj" if name == "w13" else "down_proj"
            loader = _loader_of(layer, name)
            create_parameter(
                layer,
                f"{name}_weight",
                (*shape, MX_GROUP // 2),
                torch.uint8,
                checkpoint_parts={f"{source}_blocks": None},
                weight_loader=loader,
            )
            create_parameter(
                layer,
                f"{name}_scales",
                shape,
                torch.uint8,
                checkpoint_parts={f"{source}_scales": None},
                weight_loader=loader,
            )

    def finish(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            codes = layer._parameters[f"{name}_weight"].data.flatten(2)
            # Checkpoints have the exponents as bytes, and this dtype has the same bits.
            scales = layer._parameters[f"{name}_scales"].data.view(torch.float8_e8m0fnu)
            put(layer, {f"{name}_weight": codes, f"{name}_scales": scales, f"{name}_offsets": None})


def _loader_of(layer: Any, name: str) -> Callable[..., None]:
    # Plain checkpoints of gpt-oss have [in, out], and blocks have [out, in].
    loader = dataclasses.replace(layer.loader, transposed=False)

    def load(param: Tensor, loaded: LoadedTensor, part: None = None) -> None:
        loader.load(name, param, loaded, part, unit=MX_GROUP)

    return load
