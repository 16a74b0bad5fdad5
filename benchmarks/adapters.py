"""The cost of adapters to requests without one: loaded but unused, and beside requests that use them.

Each round measures all rows, one after another, and the ratios are medians over the rounds. A ratio is the
speed of requests without an adapter, by the CPU time of the process, beside that of an engine without adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from clocks import taken
from opgraft import LLM, LoRARequest, SamplingParams
from safetensors.torch import save_file
from timing import Row, report

UNUSED = 0.97
BESIDE = 0.9
ROWS = 8
RANK = 16
PROMPT = 32
TOKENS = 48
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def written(folder: Path, config: Any, seed: int) -> str:
    """Write an adapter of all linear layers in PEFT's form, and return its folder."""
    generator = torch.Generator().manual_seed(seed)
    heads = config.num_attention_heads
    head = config.hidden_size // heads
    keys = config.num_key_value_heads * head
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = dict(
        zip(
            EVERYWHERE,
            ((hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden))
            + ((inner, hidden), (inner, hidden), (hidden, inner)),
            strict=True,
        )
    )
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (outputs, inputs) in sizes.items():
            part = "self_attn" if name in EVERYWHERE[:4] else "mlp"
            path = f"base_model.model.model.layers.{layer}.{part}.{name}"
            for matrix, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{path}.lora_{matrix}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def seconds(llm: LLM, requests: Sequence[LoRARequest | None], begin: list[int]) -> float:
    """Return the CPU seconds of answers to as many prompts, none of which is in the cache."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = []
    for number in range(len(requests)):
        begin[0] += 1
        prompts.append([begin[0] % 4000 + 100, number + 100, *range(200, 200 + PROMPT - 2)])
    measured = taken(lambda: llm.generate(prompts, params, lora_request=list(requests)))
    return measured["cpu_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "dtype": arguments.dtype,
        "load.progress": False,
        "max_model_len": 512,
    }
    plain = LLM(arguments.model, **settings)
    adapted = LLM(arguments.model, enable_lora=True, max_lora_rank=RANK, **settings)
    config = adapted.engine.core.executor.worker.runner.model.config.get_text_config()
    begin = [0]
    with tempfile.TemporaryDirectory() as root:
        loras = [
            LoRARequest(str(number), number, written(Path(root) / str(number), config, number))
            for number in range(1, ROWS // 2 + 1)
        ]
        half = ROWS // 2
        beside: dict[str, list[LoRARequest | None]] = {
            "one adapter": [None] * half + [loras[0]] * half,
            "four adapters": [None] * half + loras,
        }
        seconds(adapted, loras, begin)
        seconds(plain, [None], begin)
        ratios: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            for rows in (1, ROWS):
                base = seconds(plain, [None] * rows, begin)
                unused = seconds(adapted, [None] * rows, begin)
                ratios.setdefault(f"unused, {rows} requests", []).append(base / unused)
            for name, requests in beside.items():
                base = seconds(plain, [None] * ROWS, begin)
                mixed = seconds(adapted, requests, begin)
                ratios.setdefault(f"half of {ROWS} requests with {name}", []).append(base / mixed)
    for name, values in ratios.items():
        least = UNUSED if name.startswith("unused") else BESIDE
        print(
            f"{name:45} {statistics.median(values):.3f} (wanted {least}; {min(values):.3f} to {max(values):.3f})"
        )


if __name__ == "__main__":
    main()
