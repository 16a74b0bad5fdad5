"""GGUF files answer prompts of token ids without a tokenizer, and end and fill answers as their keys say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opgraft import LLM, SamplingParams
from opgraft.errors import CheckpointError, InputError

gguf = pytest.importorskip("gguf")

SIZE = 64
TOKENS = [*(chr(0x100 + number) for number in range(5)), "a", "b", "ab", "<end>", "<turn>"]


def write_model(file: Path, architecture: str, keys: dict[str, Any]) -> Path:
    """Write a decoder of one layer whose most likely token is always the one after the last."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    for add in (writer.add_embedding_length, writer.add_feed_forward_length):
        add(SIZE)
    for add in (writer.add_head_count, writer.add_head_count_kv):
        add(4)
    for add in (writer.add_key_length, writer.add_value_length):
        add(SIZE // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 8 + [3, 3])
    keys = {"merges": ["a b"], **keys}
    for key, value in keys.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for name, values in _weights(architecture).items():
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: Any, key: str, value: Any) -> None:
    add = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)


def _weights(architecture: str) -> dict[str, np.ndarray]:
    """Return weights by which the layer adds nothing, and each token is followed by the next one."""
    one = np.eye(len(TOKENS), SIZE)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = {f"blk.0.{name}": np.zeros((SIZE, SIZE)) for name in names}
    norms = ("attn_norm", "ffn_norm")
    if architecture == "olmo2":
        norms = ("post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")
    vectors = {f"blk.0.{name}": np.ones(SIZE) for name in norms}
    head = {"token_embd": one, "output": np.roll(one, 1, axis=0), "output_norm": np.ones(SIZE)}
    return matrices | vectors | head


def answered(file: Path, prompt: Any = (5,), **params: Any) -> list[int]:
    settings = {"load.progress": False, "cache.memory_bytes": 1 << 22}
    with LLM(str(file), dtype="float32", **settings) as llm:
        drawn = SamplingParams(temperature=0, **{"max_tokens": 8, **params})
        (output,) = llm.generate([prompt], drawn)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [("granite", "refact"), ("olmo2", "dbrx"), ("llama", "tekken"), ("gemma", "whitespace")],
)
def test_prompts_of_token_ids(architecture: str, pre: str, tmp_path: Path) -> None:
    """A model answers them, whether its vocabulary is read or not."""
    keys = {"pre": pre, "bos_token_id": 8, "eos_token_id": 8}
    file = write_model(tmp_path / "m.gguf", architecture, keys)
    assert len(answered(file, max_tokens=2, ignore_eos=True)) == 2


def test_text_for_a_vocabulary_that_is_not_read(tmp_path: Path) -> None:
    """Text is refused with the reason, and so is what needs the text of tokens."""
    file = write_model(tmp_path / "m.gguf", "llama", {"pre": "whitespace", "eos_token_id": 8})
    assert answered(file) == [6, 7, 8]
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre is 'whitespace'.* as token ids"):
        answered(file, "a")
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre is 'whitespace'"):
        answered(file, stop=["a"])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pre": "llama-bpe"}, "a text begins with a token, and tokenizer.ggml.bos_token_id is"),
        ({"pre": "gpt-2", "unknown_token_id": 99}, "its tokenizer is damaged"),
        ({"pre": "gpt-2", "merges": ["z z"]}, "its tokenizer is damaged"),
    ],
)
def test_special_tokens_that_are_missing(keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Prompts of token ids are answered, and text is refused with the reason."""
    file = write_model(tmp_path / "m.gguf", "llama", {**keys, "eos_token_id": 8})
    assert answered(file) == [6, 7, 8]
    with pytest.raises(InputError, match=rf"{reason}.* as token ids"):
        answered(file, "a")


@pytest.mark.parametrize("end", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_tokens_that_end_an_answer(end: str, tmp_path: Path) -> None:
    """They are the ones at which llama.cpp ends an answer: keys such as eot_token_id and fim_rep_token_id."""
    keys = {"pre": "gpt-2", "eos_token_id": 9, f"{end}_token_id": 7}
    assert answered(write_model(tmp_path / "m.gguf", "llama", keys)) == [6, 7]


def test_tokens_that_no_answer_has(tmp_path: Path) -> None:
    """``suppress_tokens`` counts for each request, beside the bad words of one."""
    keys = {"pre": "gpt-2", "eos_token_id": 9, "suppress_tokens": [6, 7]}
    file = write_model(tmp_path / "m.gguf", "llama", keys)
    for params in ({}, {"bad_words": ["a"]}):
        found = answered(file, max_tokens=3, **params)
        assert not {6, 7} & set(found)
        assert found


def test_a_suppressed_token_is_one_of_the_model(tmp_path: Path) -> None:
    """An id beyond the vocabulary is refused when the model is opened."""
    keys = {"pre": "gpt-2", "eos_token_id": 9, "suppress_tokens": [6, len(TOKENS)]}
    file = write_model(tmp_path / "model.gguf", "llama", keys)
    with pytest.raises(CheckpointError, match=rf"suppress_tokens has {len(TOKENS)}, which is no"):
        LLM(str(file), **{"load.progress": False})
