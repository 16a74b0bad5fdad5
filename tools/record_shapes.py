"""Record the calls of the model families that people run most: ``python tools/record_shapes.py``.

Each model has its published sizes and no weights: the device is torch's meta device. A size that is not given here is
the default of the config in transformers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from opgraft import OpgraftConfig, set_config
from opgraft.cli.traced_shapes import trace_checkpoint, trace_function
from opgraft.testing.shapes import FormCall, ModelShapes, written

# An installed package may be a folder of links.
FOLDER = Path(__file__).parents[1] / "core/testing/model_shapes"
TOKENS = 31
"""Of a prompt: its number becomes a symbol."""


def sizes(
    hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **others,
    }


def kv(heads: int, **others: Any) -> dict[str, Any]:
    return {"num_key_value_heads": heads, **others}


GPT2 = {"vocab_size": 50257}
WITHOUT_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
EPS = {"rms_norm_eps": 1e-5}
LLAMA3 = {
    **EPS,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "max_position_embeddings": 8192,
}
EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

MODELS: Mapping[str, Mapping[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": {
        "Llama-3.2-1B": (
            "Llama",
            "LlamaForCausalLM",
            sizes(2048, 8192, 16, 32, 128256, **kv(8, head_dim=64), **LLAMA3),
        ),
        "Llama-3.1-8B": (
            "Llama",
            "LlamaForCausalLM",
            sizes(4096, 14336, 32, 32, 128256, **kv(8), **LLAMA3),
        ),
        "Llama-3.1-70B": (
            "Llama",
            "LlamaForCausalLM",
            sizes(8192, 28672, 80, 64, 128256, **kv(8), **LLAMA3),
        ),
    },
    "qwen": {
        "Qwen2.5-0.5B": ("Qwen2", "Qwen2ForCausalLM", sizes(896, 4864, 24, 14, 151936, **kv(2))),
        "Qwen2.5-7B": ("Qwen2", "Qwen2ForCausalLM", sizes(3584, 18944, 28, 28, 152064, **kv(4))),
        "Qwen3-0.6B": (
            "Qwen3",
            "Qwen3ForCausalLM",
            sizes(1024, 3072, 28, 16, 151936, **kv(8, head_dim=128)),
        ),
        "Qwen3-8B": (
            "Qwen3",
            "Qwen3ForCausalLM",
            sizes(4096, 12288, 36, 32, 151936, **kv(8, head_dim=128)),
        ),
    },
    "mistral": {
        "Mistral-7B-v0.3": (
            "Mistral",
            "MistralForCausalLM",
            sizes(4096, 14336, 32, 32, 32768, **kv(8), sliding_window=None, **EPS),
        ),
        "Mistral-Nemo-12B": (
            "Mistral",
            "MistralForCausalLM",
            sizes(5120, 14336, 40, 32, 131072, **kv(8, head_dim=128), sliding_window=None, **EPS),
        ),
    },
    "gemma": {
        "Gemma-2-2B": (
            "Gemma2",
            "Gemma2ForCausalLM",
            sizes(2304, 9216, 26, 8, 256000, **kv(4, head_dim=256)),
        ),
        "Gemma-2-9B": (
            "Gemma2",
            "Gemma2ForCausalLM",
            sizes(3584, 14336, 42, 16, 256000, **kv(8, head_dim=256)),
        ),
        "Gemma-3-1B": (
            "Gemma3Text",
            "Gemma3ForCausalLM",
            sizes(1152, 6912, 26, 4, 262144, **kv(1, head_dim=256)),
        ),
    },
    "phi": {
        "Phi-3-mini-4k": (
            "Phi3",
            "Phi3ForCausalLM",
            sizes(3072, 8192, 32, 32, 32064, **kv(32), **EPS),
        ),
        "Phi-4": (
            "Phi3",
            "Phi3ForCausalLM",
            sizes(5120, 17920, 40, 40, 100352, **kv(10), **EPS, **WITHOUT_SPECIAL),
        ),
    },
    "gpt2": {
        "GPT-2": ("GPT2", "GPT2LMHeadModel", {**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}),
        "GPT-2-XL": (
            "GPT2",
            "GPT2LMHeadModel",
            {**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
        ),
    },
    "bert": {
        "BERT-base": ("Bert", "BertModel", sizes(768, 3072, 12, 12, 30522)),
        "BERT-large": ("Bert", "BertModel", sizes(1024, 4096, 24, 16, 30522)),
        "MiniLM-L6": ("Bert", "BertModel", sizes(384, 1536, 6, 12, 30522)),
    },
    "moe": {
        "Qwen3-30B-A3B": (
            "Qwen3Moe",
            "Qwen3MoeForCausalLM",
            sizes(2048, 6144, 48, 32, 151936, **kv(4, head_dim=128), **EXPERTS),
        ),
        "OLMoE-1B-7B": (
            "Olmoe",
            "OlmoeForCausalLM",
            sizes(2048, 1024, 16, 16, 50304, **kv(16), num_experts=64, **EPS),
        ),
        "Mixtral-8x7B": (
            "Mixtral",
            "MixtralForCausalLM",
            sizes(4096, 14336, 32, 32, 32000, **kv(8), **EPS),
        ),
    },
    "mamba": {
        "Mamba-130M": (
            "Mamba",
            "MambaForCausalLM",
            {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},
        ),
        "Mamba-2.8B": (
            "Mamba",
            "MambaForCausalLM",
            {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280},
        ),
        "Mamba-2-2.7B": (
            "Mamba2",
            "Mamba2ForCausalLM",
            {
                "hidden_size": 2560,
                "num_hidden_layers": 64,
                "vocab_size": 50288,
                "num_heads": 80,
                "n_groups": 1,
            },
        ),
    },
}
"""By record and model: the name of the config in transformers, the architecture, and the sizes."""

SINGLE = frozenset({"gpt2", "bert"})
"""The records of models with weights in float32."""

IMAGES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "ViT-base-16": ("ViTConfig", "ViTModel", {}),
    "ViT-large-16": (
        "ViTConfig",
        "ViTModel",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    "CLIP-ViT-L-14": (
        "CLIPVisionConfig",
        "CLIPVisionModel",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 14,
        },
    ),
}
"""The vision transformers, which see one image of 224 by 224."""

pending: list[str] = []
"""The name of the vision transformer that ``image_model`` builds next."""


def image_model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config, cls, values = IMAGES[pending.pop()]
    with torch.device("meta"):
        model = getattr(transformers, cls)(getattr(transformers, config)(**values))
        return model, {"pixel_values": torch.zeros(1, 3, 224, 224)}


def counts_of(
    config: str, architecture: str, values: dict[str, Any], dtype: str
) -> Mapping[FormCall, int]:
    made = getattr(transformers, f"{config}Config")(
        **values, dtype=dtype, architectures=[architecture]
    )
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return trace_checkpoint(folder, TOKENS, on_meta=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    # Such as the CPU's: no plugin changes what layers call.
    with set_config(OpgraftConfig(plugins=(), platform="cpu")):
        for name, models in MODELS.items():
            dtype = "float32" if name in SINGLE else "bfloat16"
            write(
                name,
                [ModelShapes(model, counts_of(*given, dtype)) for model, given in models.items()],
            )
        images = []
        for model in IMAGES:
            pending.append(model)
            images.append(ModelShapes(model, trace_function(f"{__name__}:image_model")))
        write("vit", images)


def write(name: str, models: list[ModelShapes]) -> None:
    file = FOLDER / f"{name}.json"
    file.write_text(written(models), encoding="utf-8")
    print(f"{sum(len(model.counts) for model in models)} kinds of calls written to {file.name}")


if __name__ == "__main__":
    main()
