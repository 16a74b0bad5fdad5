"""Make the small checkpoints of the bundle: the first layers of SmolLM2, and of MiniLM with its first words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from opgraft.models import find_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file

LANGUAGE_LAYERS = 3
ENCODER_LAYERS = 2
WORDS = 6000
"""Entries of MiniLM's vocabulary that are kept. It is in the order of frequency: common words are among them."""

EMBEDDING = "token_embd.weight"
BLOCKS = "llama.block_count"
SMALL = gguf.GGMLQuantizationType.Q4_1


def write_language_model(file: Path) -> None:
    """Write the first layers of SmolLM2, whose embedding gets 4 bits as its layers have."""
    reader = gguf.GGUFReader(find_checkpoint("smollm2"))
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = LANGUAGE_LAYERS if name == BLOCKS else field.contents()
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) >= LANGUAGE_LAYERS:
            continue
        data, kind = tensor.data, tensor.tensor_type
        if tensor.name == EMBEDDING:
            numbers = gguf.quants.dequantize(data, kind)
            data, kind = gguf.quants.quantize(numbers, SMALL), SMALL
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_encoder(folder: Path) -> None:
    """Write the first layers of MiniLM in float16, with its tokenizer, for the first words of its vocabulary."""
    source = find_checkpoint("minilm")
    folder.mkdir(parents=True)
    for name in ("modules.json", "sentence_bert_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, folder)
    shutil.copytree(source / "1_Pooling", folder / "1_Pooling")
    shutil.copy(source / "tokenizer_config.json", folder)
    config = _json(source / "config.json")
    config |= {"num_hidden_layers": ENCODER_LAYERS, "vocab_size": WORDS, "dtype": "float16"}
    _write_json(folder / "config.json", config)
    tokenizer = _json(source / "tokenizer.json")
    words: dict[str, int] = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: id_ for word, id_ in words.items() if id_ < WORDS}
    _write_json(folder / "tokenizer.json", tokenizer)
    lines = (source / "vocab.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "vocab.txt").write_text("".join(lines[:WORDS]), encoding="utf-8")
    with safe_open(source / "model.safetensors", "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in list(stored.keys()) if _kept(name)}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            rows = tensor[:WORDS] if "word_embeddings" in name else tensor
            tensors[name] = rows.to(torch.float16).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _kept(name: str) -> bool:
    """Tell whether a tensor is of one of the layers that are kept, or of none."""
    parts = name.split(".")
    return "layer" not in parts or int(parts[parts.index("layer") + 1]) < ENCODER_LAYERS


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
