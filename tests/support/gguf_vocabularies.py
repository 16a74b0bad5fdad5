"""GGUF files whose vocabularies tell how a text was cut."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

TEXTS = (
    "Hello world",
    "  two  spaces ",
    "\n\n\tcode \n x = 12",
    "I'm don't THEY'RE It'S",
    "12 123 1234 1234567",
    "1,234.5 a1b22c333d",
    "abc123def 5678ghi",
    "na\u00efve \u00dcn\u00efted",
    "\u6f22\u5b57\u304b\u306a\u3001\u6587\u3002",
    "\uff11\uff12 \u4e2d\u6587A",
    "\ud55c\uad6d\uc5b4 1",
    "\u041f\u0440\u0438, \u043c\u0438\u0440!",
    "\u0645\u0631\u062d\u0628\u0627 \u0662\u0663",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0967",
    "\u0e44\u0e17\u0e22 \u0e97",
    "\U0001f600 ok",
    "camelCase HTTPServer",
    "foo_bar(q)[1]{2}<3>|4~5",
    "!!! ?? --- a//b",
    "x\n\n\ny \n z",
    "tab\tsep\t\tend",
    "'quoted' ''two'' 'S 'll",
    "a  b   c    d",
    "\n",
    "\r\n",
    " ",
    "a\u00a0b",
    "<sentinel:12>IMGIMGABZ",
    "e\u0301a combining",
    "\u201csmart\u201d \u2014 dash\u2026",
    "\u00bd \u00b2 \u2167 \u2460",
    "   ",
    "1 2 3 word1",
    "A.B. e.g., U.S.",
    "// done;\nint x;",
)


def write_vocabulary(
    file: Path,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    architecture: str = "llama",
    kind: str = "gpt2",
    keys: Mapping[str, Any] = {},
) -> None:
    """Write a file without weights. ``keys`` are more metadata."""
    writer = gguf.GGUFWriter(file, architecture)
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count):
        add(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for key, value in keys.items():
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def byte_spelled(text: str) -> str:
    """Spell a text in the alphabet of bytes."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in spelling.pre_tokenize_str(text))


@functools.cache
def _parts() -> tuple[list[str], list[str]]:
    """Return every part of each text, and all merges of parts."""
    parts: dict[str, None] = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merges: dict[str, None] = {}
    for text in map(byte_spelled, TEXTS):
        for size in range(2, len(text) + 1):
            for begin in range(len(text) - size + 1):
                part = text[begin : begin + size]
                parts[part] = None
                borders = range(1, size)
                merges.update(dict.fromkeys(f"{part[:at]} {part[at:]}" for at in borders))
    return list(parts), list(merges)


def write_pieces(file: Path, pre: str) -> list[str]:
    """Write a vocabulary with every part of each text and all merges, so that each piece becomes one token.

    Returns:
        The tokens. One more is a word that no merges lead to.
    """
    parts, merges = _parts()
    tokens = [*parts, "Ġwhole", "<begin>", "<end>"]
    types = [NORMAL] * (len(tokens) - 2) + [CONTROL, CONTROL]
    keys = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    write_vocabulary(file, tokens, types, keys=keys)
    return tokens
