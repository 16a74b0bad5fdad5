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
    """Weights of experts in 4 bits, with a power of two for each 32 inputs. Others are plain."""

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
    """Blocks and scales of all experts in one, kept unchanged.

    A checkpoint has ``gate_up_proj_blocks`` ``[experts, 2 · intermediate, hidden / 32, 16]``,
    ``gate_up_proj_scales`` without the last dimension, and ``down_proj_…`` likewise, all in
    ``uint8``; a scale is ``2 ** (scale - 127)``.
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
            settings = {"weight_loader": _loader_of(layer, name)}
            blocks, scales = {f"{source}_blocks": None}, {f"{source}_scales": None}
            create_parameter(
                layer,
                f"{name}_weight",
                (*shape, MX_GROUP // 2),
                torch.uint8,
                checkpoint_parts=blocks,
                **settings,
            )
            create_parameter(
                layer, f"{name}_scales", shape, torch.uint8, checkpoint_parts=scales, **settings
            )

    def finish(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            codes = layer._parameters[f"{name}_weight"].data.flatten(2)
            scales = layer._parameters[f"{name}_scales"].data.view(torch.float8_e8m0fnu)
            put(layer, {f"{name}_weight": codes, f"{name}_scales": scales, f"{name}_offsets": None})


def _loader_of(layer: Any, name: str) -> Callable[..., None]:
    loader = dataclasses.replace(layer.loader, transposed=False)

    def load(param: Tensor, loaded: LoadedTensor, part: None = None) -> None:
        loader.load(name, param, loaded, part, unit=MX_GROUP)

    return load
