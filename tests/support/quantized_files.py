"""Files of checkpoints that are quantized already, and models that are loaded from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, QuantizationSettings
from opgraft.models import load_model
from opgraft.ops.linear.quantized.storage import dequantize
from safetensors.torch import save_file
from support.quantized_formats import FORMATS, FP8, Written
from torch import Tensor

TOKENS = torch.tensor([1, 5, 9, 33, 2, 71, 8])


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(folder: Path, plain: Path, llama: Any, form: str, **settings: Any) -> dict[str, Tensor]:
    """Write a checkpoint whose projections have a form; return their weights in float64."""
    config, quantize = FORMATS[form]
    return write_layers(
        folder,
        plain,
        llama,
        {**config, **settings},
        lambda name: quantize if is_quantized(name) else None,
    )


def write_layers(
    folder: Path,
    plain: Path,
    llama: Any,
    settings: Mapping[str, Any],
    form_of: Callable[[str], Callable[[Tensor], Written] | None],
    beside: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Write a checkpoint, each weight in its form; return the quantized weights in float64."""
    shutil.copytree(plain, folder)
    tensors, meant = dict(beside or {}), {}
    for name, weight in llama.state_dict().items():
        quantize = form_of(name)
        if quantize is None:
            tensors[name] = weight.clone()
            continue
        parts, meant[name] = quantize(weight)
        layer = name.removesuffix("weight")
        tensors |= {layer + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return meant


def config_of(
    folder: Path, method: str | None = None, implementation: str = "auto"
) -> OpgraftConfig:
    return OpgraftConfig(
        model=ModelConfig(name=str(folder), dtype="float32", implementation=implementation),
        load=LoadConfig(device="cpu", progress=False),
        quantization=QuantizationSettings(method=method),
    )


def model_of(folder: Path, method: str | None = None, implementation: str = "auto") -> Any:
    return load_model(config_of(folder, method, implementation))


def logits_of(folder: Path, method: str | None = None, implementation: str = "auto") -> Tensor:
    model = model_of(folder, method, implementation)
    with torch.inference_mode():
        logits: Tensor = model.compute_logits(model(TOKENS, torch.arange(len(TOKENS))))
    return logits


def held(layer: Any) -> Tensor:
    """Return the weight that a layer holds, in float64, inputs in their own order."""
    if layer.weight.dtype != FP8:
        plain = dequantize(
            layer.weight, layer.scales, layer.offsets, layer.input_size, torch.float64
        )
        order = getattr(layer, "input_order", None)
        return plain if order is None else plain[:, order.argsort()]
    rows, columns = layer.weight_scale.shape
    down, across = layer.weight.shape[0] // rows, layer.weight.shape[1] // columns
    scales = layer.weight_scale.double().repeat_interleave(down, 0).repeat_interleave(across, 1)
    return layer.weight.double() * scales
