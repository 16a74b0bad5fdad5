"""Rows of checkpoints and inputs that are wrong, and the commands that read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Harm = Callable[[Path], object]

RUN = ("run", "{model}", "the cat")
PLAN = ("plan", "{model}", "--devices", "2", "--device", "h100")
CHAT = ("chat", "{model}")
SERVE = ("serve", "{model}", "--parallel.executor", "in_process", "--port", "0")
READS_ALL = (RUN, CHAT, SERVE)
READS_CONFIG = (RUN, PLAN, CHAT, SERVE)


def configured(file: str = "config.json", **values: object) -> Harm:
    """Write other values into a file of settings."""

    def harm(folder: Path) -> None:
        path = folder / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))

    return harm


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Harm:
    """Change the weights."""

    def harm(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def each(change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> Harm:
    """Change the weights whose names have a part."""
    return weights(lambda tensors: tensors.update({n: change(t) for n, t in tensors.items() if part in n}))


def instead(name: str, make: Callable[[Path], object]) -> Harm:
    """Put something else in the place of a file."""

    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def removed(name: str) -> Harm:
    return lambda folder: (folder / name).unlink()


NORM = "model.norm.weight"
HOSTILE = "ev\x1b[31m\u202eil\nFORGED: \0"

CONFIGS: Mapping[str, tuple[Harm, str]] = {
    "a million layers": (configured(num_hidden_layers=1_000_000), ""),
    "a billion billion layers": (configured(num_hidden_layers=10**18), ""),
    "no layers": (configured(num_hidden_layers=0), ""),
    "layers below none": (configured(num_hidden_layers=-2), ""),
    "layers in words": (configured(num_hidden_layers="two"), ""),
    "half a layer": (configured(num_hidden_layers=1.5), ""),
    "a vocabulary of a billion billion": (configured(vocab_size=10**18), ""),
    "no vocabulary": (configured(vocab_size=0), ""),
    "rows without end": (configured(hidden_size=2**62), ""),
    "rows below none": (configured(hidden_size=-32), ""),
    "heads that do not divide": (configured(num_attention_heads=3), ""),
    "keys that do not divide": (configured(num_key_value_heads=3), ""),
    "no heads": (configured(num_attention_heads=0), ""),
    "a wide layer": (configured(intermediate_size=2**60), ""),
    "an epsilon in words": (configured(rms_norm_eps="small"), ""),
    "an activation that nobody knows": (configured(hidden_act="acmelu"), ""),
    "a hostile activation": (configured(hidden_act=HOSTILE), ""),
    "a hostile type": (configured(model_type=HOSTILE), ""),
    "a hostile dtype": (configured(torch_dtype=HOSTILE, dtype=HOSTILE), ""),
    "a rope that nobody knows": (configured(rope_scaling={"rope_type": "acme", "factor": 2.0}), ""),
    "a quantisation that nobody knows": (configured(quantization_config={"quant_method": HOSTILE}), ""),
    "a config that is a pipe": (instead("config.json", os.mkfifo), ""),
    "a config that is a device": (instead("config.json", to_zero), ""),
    "a config that is a folder": (instead("config.json", Path.mkdir), ""),
    "a config that is binary": (instead("config.json", lambda path: path.write_bytes(b"\xff\xfe\0")), ""),
    "a config that is a list": (instead("config.json", lambda path: path.write_text("[]")), ""),
    "a config of 200 MB": (instead("config.json", lambda path: path.write_text(" " * (200 << 20))), ""),
}
"""Faults that every command finds, without a look at the weights."""

CONTENTS: Mapping[str, tuple[Harm, str]] = {
    "a tensor is missing": (weights(lambda tensors: tensors.pop(NORM)), ""),
    "a tensor too many": (weights(lambda tensors: tensors.update(acme=torch.ones(2))), ""),
    "a hostile tensor": (weights(lambda tensors: tensors.update({HOSTILE: torch.ones(2)})), ""),
    "a tensor of another shape": (each(lambda tensor: tensor[:-1].clone(), NORM), ""),
    "whole numbers for weights": (each(lambda tensor: tensor.to(torch.int32), NORM), ""),
    "bits for weights": (each(lambda tensor: tensor > 0, "mlp"), ""),
    "complex weights": (each(lambda tensor: tensor.to(torch.complex64), NORM), ""),
    "weights that are no numbers": (each(lambda tensor: tensor * torch.nan), ""),
    "weights that are pipes": (instead("model.safetensors", os.mkfifo), ""),
    "weights that are a device": (instead("model.safetensors", to_zero), ""),
    "weights that are a folder": (instead("model.safetensors", Path.mkdir), ""),
    "a tokenizer that is a pipe": (instead("tokenizer.json", os.mkfifo), ""),
    "a tokenizer that is a device": (instead("tokenizer.json", to_zero), ""),
    "a tokenizer that is a folder": (instead("tokenizer.json", Path.mkdir), ""),
    "a tokenizer of more words than the model": (configured(vocab_size=8), ""),
    "an end outside the vocabulary": (configured("generation_config.json", eos_token_id=10**6), ""),
    "an end below none": (configured("generation_config.json", eos_token_id=-5), ""),
    "an end in words": (configured("generation_config.json", eos_token_id="</s>"), ""),
    "a temperature below none": (configured("generation_config.json", temperature=-1.0), ""),
    "a temperature in words": (configured("generation_config.json", temperature="warm"), ""),
    "a share above all": (configured("generation_config.json", top_p=7.0), ""),
    "candidates below none": (configured("generation_config.json", top_k=-7), ""),
    "a penalty that is no number": (configured("generation_config.json", repetition_penalty="much"), ""),
    "a generation config that is a list": (
        instead("generation_config.json", lambda path: path.write_text("[]")),
        "",
    ),
    "a generation config that is a pipe": (instead("generation_config.json", os.mkfifo), ""),
    "a template that is torn": (instead("chat_template.jinja", lambda path: path.write_text("{% for")), ""),
    "a template that is a pipe": (instead("chat_template.jinja", os.mkfifo), ""),
}
"""Faults in what is read after that, which a plan goes without."""
