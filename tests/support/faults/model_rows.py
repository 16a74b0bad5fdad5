"""Rows of checkpoints and inputs that are wrong, and the commands that read them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Harm = Callable[[Path], object]

RUN = ("run", "{model}", "the cat")
PLAN = ("plan", "{model}", "--devices", "2", "--device", "h100")
CHAT = ("chat", "{model}")
SERVE = ("serve", "{model}", "--port", "0")
VERIFY = ("verify", "{model}")


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
    return weights(
        lambda tensors: tensors.update({n: change(t) for n, t in tensors.items() if part in n})
    )


def instead(name: str, make: Callable[[Path], object]) -> Harm:
    """Put something else in the place of a file."""

    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def file(content: bytes) -> Harm:
    return lambda path: path.write_bytes(content)


def larger_than_any(path: Path) -> None:
    """Write 200 MB, which take no room."""
    with path.open("wb") as file:
        file.truncate(200 << 20)


def more_words(folder: Path) -> None:
    """Have the tokenizer know a word that the model has no row for."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["cat"] = 10_000
    path.write_text(json.dumps(content))


def larger_than_memory(folder: Path) -> None:
    """Put 2 TB, which take no room, in the place of the weights."""
    header = {
        "model.embed_tokens.weight": {
            "dtype": "F32",
            "shape": [1 << 34, 32],
            "data_offsets": [0, 1 << 41],
        }
    }
    text = json.dumps(header).encode()
    configured(vocab_size=1 << 34)(folder)
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(struct.pack("<Q", len(text)) + text)
        weights.truncate(8 + len(text) + (1 << 41))


NORM = "model.norm.weight"
WORD = "</s>"
HOSTILE = "ev\x1b[31m\u202eil\nFORGED: \0"

CONFIGS: Mapping[str, tuple[Harm, str]] = {
    "a million layers": (
        configured(num_hidden_layers=1_000_000),
        "no model has more than 4,096 layers",
    ),
    "a billion billion layers": (
        configured(num_hidden_layers=10**18),
        "no model has more than 4,096 layers",
    ),
    "no layers": (
        configured(num_hidden_layers=0),
        "num_hidden_layers is 0, expected an integer from 1",
    ),
    "layers below none": (configured(num_hidden_layers=-2), "num_hidden_layers is -2, expected"),
    "layers in words": (configured(num_hidden_layers="two"), "num_hidden_layers"),
    "half a layer": (configured(num_hidden_layers=1.5), "num_hidden_layers"),
    "a vocabulary of a billion billion": (
        configured(vocab_size=10**18),
        "take the config of these weights",
    ),
    "no vocabulary": (configured(vocab_size=0), "vocab_size 0"),
    "rows without end": (configured(hidden_size=2**62), "take the config of these weights"),
    "rows below none": (configured(hidden_size=-32), "hidden_size -32"),
    "heads that do not divide": (configured(num_attention_heads=3), "not a multiple of the"),
    "keys that do not divide": (
        configured(num_key_value_heads=3),
        "which num_key_value_heads, 3, does not divide",
    ),
    "no heads": (configured(num_attention_heads=0), "cannot read the configuration"),
    "a wide layer": (
        configured(intermediate_size=2**60),
        "intermediate_size is 1152921504606846976, expected",
    ),
    "an epsilon in words": (configured(rms_norm_eps="small"), "rms_norm_eps"),
    "an activation that nobody knows": (
        configured(hidden_act="acmelu"),
        "the activation 'acmelu' is none of",
    ),
    "a hostile activation": (configured(hidden_act=HOSTILE), "the activation 'ev"),
    "a hostile type": (configured(model_type=HOSTILE), "model_type is 'ev"),
    "a rope that nobody knows": (
        configured(rope_scaling={"rope_type": "acme", "factor": 2.0}),
        "rope_type is 'acme'",
    ),
    "a quantisation that nobody knows": (
        configured(quantization_config={"quant_method": HOSTILE}),
        "no quantization is called",
    ),
    "a config that is a pipe": (instead("config.json", os.mkfifo), "has no config.json"),
    "a config that is a device": (instead("config.json", to_zero), "has no config.json"),
    "a config that is a folder": (instead("config.json", Path.mkdir), "has no config.json"),
    "a config that is binary": (
        instead("config.json", file(b"\xff\xfe\0")),
        "config.json cannot be read as JSON",
    ),
    "a config that is a list": (
        instead("config.json", file(b"[]")),
        "config.json holds a list, expected a JSON object",
    ),
    "a config of 200 MB": (
        instead("config.json", larger_than_any),
        "config.json cannot be read as JSON: it is larger than",
    ),
}
"""Faults that every command finds, without a look at the weights."""

CONTENTS: Mapping[str, tuple[Harm, str]] = {
    "a tensor is missing": (
        weights(lambda tensors: tensors.pop(NORM)),
        "'model.norm.weight' is missing",
    ),
    "a tensor too many": (
        weights(lambda tensors: tensors.update(acme=torch.ones(2))),
        "'acme' has no place",
    ),
    "a hostile tensor": (
        weights(lambda tensors: tensors.update({HOSTILE: torch.ones(2)})),
        "has no place",
    ),
    "a tensor of another shape": (
        each(lambda tensor: tensor[:-1].clone(), NORM),
        "'model.norm.weight' has shape [31]",
    ),
    "whole numbers for weights": (
        each(lambda tensor: tensor.to(torch.int32), NORM),
        "has torch.int32",
    ),
    "bits for weights": (each(lambda tensor: tensor > 0, "mlp"), "has torch.bool"),
    "complex weights": (
        each(lambda tensor: tensor.to(torch.complex64), NORM),
        "has torch.complex64",
    ),
    "weights that are no numbers": (each(lambda tensor: tensor * torch.nan), "logits are NaN"),
    "more weights than memory": (
        larger_than_memory,
        "model.",
    ),  # cannot be mapped, or others are missing
    "weights that are pipes": (
        instead("model.safetensors", os.mkfifo),
        "model.safetensors is no whole safetensors file (it is no regular file)",
    ),
    "weights that are a device": (instead("model.safetensors", to_zero), "(it is no regular file)"),
    "weights that are a folder": (instead("model.safetensors", Path.mkdir), "Is a directory"),
    "a tokenizer that is a pipe": (
        instead("tokenizer.json", os.mkfifo),
        "cannot load the tokenizer",
    ),
    "a tokenizer that is a device": (
        instead("tokenizer.json", to_zero),
        "cannot load the tokenizer",
    ),
    "a tokenizer that is a folder": (
        instead("tokenizer.json", Path.mkdir),
        "cannot load the tokenizer",
    ),
    "a tokenizer of more words than the model": (
        configured(vocab_size=8),
        "take the config of these weights",
    ),
    "an end beyond the vocabulary": (
        configured("generation_config.json", eos_token_id=[2, 99]),
        "eos_token_id 99 is no token of the model, whose vocabulary has 16",
    ),
    "an end below none": (
        configured("generation_config.json", eos_token_id=-1),
        "eos_token_id -1 is no token of the",
    ),
    "an end in words": (
        configured("generation_config.json", eos_token_id=WORD),
        "eos_token_id is '</s>', expected a token id",
    ),
    "a generation config that is a list": (
        instead("generation_config.json", file(b"[]")),
        "",
    ),
    "a word without a row": (
        more_words,
        "the token id 10000 at place 2, and the vocabulary has 16",
    ),
    "a template that is torn": (
        instead("chat_template.jinja", file(b"{% for")),
        "the chat template 'default'",
    ),
}
"""Faults in what is read after that, which a plan goes without."""

PAST_A_SERVER = ("a word without a row", "a template that is torn")
"""Those of ``CONTENTS`` that concern some requests only, which a server refuses one by one."""

SETTINGS: Mapping[tuple[str, ...], str] = {
    ("--temperature", "nan"): "temperature is nan",
    ("--temperature", "inf"): "temperature is inf",
    ("--temperature", "-1"): "-1.0 is not in the range",
    ("--temperature", "hot"): "'hot' is not a valid float",
    ("--max-tokens", "0"): "0 is not in the range",
    ("--max-tokens", "1.5"): "'1.5' is not a valid integer",
    ("--model.max_model_len", "2049"): "made for contexts of up to 2048 tokens",
    ("--model.max_model_len", "0"): "use an integer at least 1",
    ("--model.seed", "-1"): "use an integer at least 0",
    ("--model.seed", "9" * 25): "use an integer at least 0 and at most 9223372036854775807",
    ("--model.dtype", "float8"): "use one of auto",
    ("--load.device", "nowhere"): "load.device is 'nowhere', which torch cannot use here",
    ("--load.device", "cuda:99"): "load.device is 'cuda:99', which torch cannot use here",
    ("--cache.num_blocks", "0"): "use an integer at least 1",
    ("--cache.num_blocks", str(10**12)): "the cache of 1,000,000,000,000 blocks",
    ("--cache.memory_bytes", "1"): "the cache has room for 0 blocks",
    ("--cache.memory_share", "2"): "use a number above 0 and at most 1",
    ("--quantization.method", "acme"): "no quantization is called 'acme'",
}
"""Settings out of range, and what is told of them."""

EMBEDS = ("run", "{model}", "the cat", "a dog")
ENCODERS: Mapping[str, tuple[Harm, str]] = {
    "a million layers in an encoder": (
        configured(num_hidden_layers=10**6),
        "no model has more than 4,096 layers",
    ),
    "a pooling that nobody knows": (
        configured("1_Pooling/config.json", pooling_mode="middle"),
        "the pooling mode",
    ),
    "a hostile pooling": (
        configured("1_Pooling/config.json", pooling_mode=HOSTILE),
        "the pooling mode",
    ),
    "a pooling that is a list of numbers": (
        configured("1_Pooling/config.json", pooling_mode=[3]),
        "the pooling mode",
    ),
    "a pooling of another form": (
        instead("1_Pooling/config.json", file(b"[]")),
        "holds a list, expected a JSON object",
    ),
    "fewer positions than the model": (
        configured(max_position_embeddings=8),
        "position_embeddings",
    ),
    "a layer that is missing": (
        weights(lambda tensors: tensors.pop("encoder.layer.1.output.dense.weight")),
        "missing",
    ),
    "a word without a row in an encoder": (
        more_words,
        "text 1 of 2 has the token id 10000 at place 1, and the vocabulary has 16 (0 to 15)",
    ),
    "embeddings that are no numbers": (each(lambda tensor: tensor * torch.nan), "NaN"),
}
"""Faults of an encoder."""


LONG = "a" * 5000
NAMES = {
    LONG: "no folder and no file: give a checkpoint folder",
    f"{LONG}/{LONG}": "no folder and no file: give a checkpoint folder",
    f"{LONG}:f": "no folder and no file: give a checkpoint folder",
    "": "'' is no folder and no file: give a checkpoint folder",
}
"""Names of models that no file system has, and what is told of them."""

INPUTS: Mapping[str, tuple[Harm, str]] = {
    "no file": (lambda path: None, "cannot be read: No such file"),
    "a folder": (Path.mkdir, "cannot be read: Is a directory"),
    "a pipe that nobody writes to": (os.mkfifo, "is empty"),
    "a device without end": (to_zero, "has more than 67,108,864 bytes"),
    "an empty device": (lambda path: path.symlink_to("/dev/null"), "is empty"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
    "nothing": (file(b""), "is empty"),
    "white space": (file(b" \n\t\n"), "is empty"),
    "UTF-16": (file("the cat".encode("utf-16")), "is not UTF-8"),
    "Latin-1": (file(b"caf\xe9\n"), "is not UTF-8"),
    "too many bytes": (larger_than_any, "has more than 67,108,864 bytes"),
    "more lines than anybody waits for": (
        file(b"a\n" * 1_048_577),
        "has 1,048,577 lines, more than 1,048,576: split it",
    ),
    "a line longer than the model": (file(b"the cat " * 5000), "2048"),
}
"""Files of input, and what is told of them."""
