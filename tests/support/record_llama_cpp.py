"""Write ``models/llama_cpp.json``: what llama.cpp makes of texts, for each name of ``tokenizer.ggml.pre``.

Run it in an environment of ``benchmarks/peers/llama_cpp.txt`` that has opgraft[demo] too:
``python tests/support/record_llama_cpp.py``.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import llama_cpp
from opgraft.models.gguf_splits import REFUSED
from support.gguf_vocabularies import TEXTS, write_pieces

NAMES = [
    "default",
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "spark2_5",
    "youtu",
    "falcon",
    "mpt",
    "starcoder",
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "gigachat",
    "jina-v2-es",
    "jina-v2-de",
    "a.x-4.0",
    "mellum",
    "modern-bert",
    "jais-2",
    "gemma4",
    "granite-embed-multi-311m",
    "sarvam-moe",
    "jina-v1-en",
    "jina-v2-code",
    "roberta-bpe",
    "whitespace",
    "refact",
    "command-r",
    "qwen2",
    "deepseek-r1-qwen",
    "kormo",
    "f2llmv2",
    "qwen35",
    "stablelm2",
    "olmo",
    "dbrx",
    "smaug-bpe",
    "poro-chat",
    "chatglm-bpe",
    "glm4",
    "glm5",
    "viking",
    "jais",
    "tekken",
    "smollm",
    "codeshell",
    "bloom",
    "gpt3-finnish",
    "exaone",
    "exaone4",
    "exaone-moe",
    "chameleon",
    "minerva-7b",
    "megrez",
    "gpt-4o",
    "llama4",
    "kanana2",
    "talkie",
    "granite-embed-multi-97m",
    "tiny_aya",
    "cohere2moe",
    "superbpe",
    "trillion",
    "granite-docling",
    "bailingmoe",
    "bailingmoe2",
    "llada-moe",
    "seed-coder",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "joyai-llm",
    "kimi-k2",
    "ufakzeka",
    "grok-2",
    "afmoe",
    "laguna",
    "minimax-m2",
    "solar-open",
    "mellum2",
    "minicpm5",
]
"""The names in ``src/llama-vocab.cpp`` of the llama.cpp that the list of packages pins."""


def main() -> None:
    """Write the file: the names with the texts' pieces, marked by ``|``, and the flags of each."""
    rows: dict[str, tuple[str, ...]] = {}
    flags = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(set(NAMES) - set(REFUSED)):
            file = Path(folder) / "model.gguf"
            tokens = write_pieces(file, name)
            model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
            ids = [model.tokenize(text.encode(), add_bos=False) for text in TEXTS]
            rows[name] = tuple("|".join(tokens[each] for each in row) for row in ids)
            begun = model.tokenize(b" whole", add_bos=True, special=True)
            flags[name] = {
                "begins": begun[0] == tokens.index("<begin>"),
                "whole_words": begun[-1] == tokens.index("Ġwhole"),
            }
    groups = itertools.groupby(sorted(rows, key=rows.__getitem__), rows.__getitem__)
    pieces = [{"names": list(names), "texts": row} for row, names in groups]
    content = {"names": NAMES, "flags": flags, "pieces": pieces}
    target = Path(__file__).parents[1] / "models" / "llama_cpp.json"
    target.write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
