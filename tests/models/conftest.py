"""Checkpoints of small random models, written by the libraries that define the formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

HEADS, KEY_HEADS = 4, 2
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_config(**values: object):
    """A Llama of two layers whose rows are whole blocks of every GGUF type."""
    sizes = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    return transformers.LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": False, **values})


@pytest.fixture(scope="session")
def llama():
    """The model."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config()).eval()


@pytest.fixture(scope="session")
def sharded(llama, tmp_path_factory) -> Path:
    """Its checkpoint in several shards with an index."""
    folder = tmp_path_factory.mktemp("sharded")
    llama.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="session")
def single(llama, tmp_path_factory) -> Path:
    """Its checkpoint in one file."""
    folder = tmp_path_factory.mktemp("single")
    llama.save_pretrained(folder)
    return folder


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp writes, as its converter has it."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(file: Path, model, kind: str) -> dict[str, torch.Tensor]:
    """Write a Llama as llama.cpp's converter does; return what its matrices are after quantization, by name."""
    config, quantized = model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    expected = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        use = quantized if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        blocks = gguf.quants.quantize(values, use)
        expected[name] = torch.from_numpy(gguf.quants.dequantize(blocks, use).copy())
        writer.add_tensor(_gguf_name(name), _ordered(name, blocks), raw_dtype=use)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in GGUF_NAMES:
        return f"{GGUF_NAMES[module]}.{kind}"
    _, _, number, inner = module.split(".", 3)
    return f"blk.{number}.{GGUF_NAMES[inner]}.{kind}"


def _ordered(name: str, blocks: np.ndarray) -> np.ndarray:
    if "q_proj" in name:
        return permuted(blocks, HEADS)
    return permuted(blocks, KEY_HEADS) if "k_proj" in name else blocks
