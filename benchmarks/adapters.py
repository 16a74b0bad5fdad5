"""The cost of adapters to requests without one: loaded but unused, and beside requests that use them.

A row is the CPU time of answers by an engine with adapters, over that of the same number of answers by an engine
without adapters. Each round measures both, one after another, and a row is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from clocks import taken
from opgraft import LLM, LoRARequest, SamplingParams
from safetensors.torch import save_file
from timing import Row, print_table

UNUSED = 1 / 0.97
BESIDE = 1 / 0.9
ROWS = 8
RANK = 16
PROMPT = 32
TOKENS = 24


def _matrices(
    path: str, sizes: Mapping[str, tuple[int, int]], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random matrices for the linear layers of a part of a layer."""
    tensors = {}
    for name, (outputs, inputs) in sizes.items():
        for matrix, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.randn(shape, generator=generator) * 0.01
            tensors[f"{path}.{name}.lora_{matrix}.weight"] = values
    return tensors


def written(folder: Path, config: Any, seed: int) -> str:
    """Write an adapter of all linear layers in PEFT's form, and return its folder."""
    generator = torch.Generator().manual_seed(seed)
    heads = config.num_attention_heads
    head = config.hidden_size // heads
    keys = config.num_key_value_heads * head
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = {
        "q_proj": (hidden, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, hidden),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for part, sizes in (("self_attn", attention), ("mlp", mlp)):
            tensors.update(
                _matrices(f"base_model.model.model.layers.{layer}.{part}", sizes, generator)
            )
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
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "dtype": arguments.dtype,
        "load.progress": False,
        "max_model_len": 512,
    }
    plain = LLM(arguments.model, **settings)
    adapted = LLM(arguments.model, enable_lora=True, max_lora_rank=RANK, **settings)
    executor: Any = adapted.engine.core.executor
    config = executor.worker.runner.model.config.get_text_config()
    begin = [0]
    half = ROWS // 2
    alone: list[LoRARequest | None] = [None] * half
    with tempfile.TemporaryDirectory() as root:
        # Rank 16, as vLLM's default.
        loras = [
            LoRARequest(str(number), number, written(Path(root) / str(number), config, number))
            for number in range(1, ROWS // 2 + 1)
        ]
        seconds(adapted, loras, begin)
        seconds(plain, [None], begin)
        compared: dict[str, tuple[Sequence[LoRARequest | None], float]] = {
            "one request, adapters unused": ([None], UNUSED),
            f"{ROWS} requests, adapters unused": ([None] * ROWS, UNUSED),
            f"{ROWS} requests, half of them with one adapter": (
                [*alone, *[loras[0]] * half],
                BESIDE,
            ),
            f"{ROWS} requests, half of them with {half} adapters": ([*alone, *loras], BESIDE),
        }
        ratios: dict[str, list[float]] = {name: [] for name in compared}
        for number in range(1, arguments.rounds + 1):
            for name, (requests, _limit) in compared.items():
                base = seconds(plain, [None] * len(requests), begin)
                ratios[name].append(seconds(adapted, requests, begin) / base)
            print(f"measured: round {number} of {arguments.rounds}", file=sys.stderr)
    rows = []
    for name, values in ratios.items():
        detail = f"{min(values):.3f} to {max(values):.3f} in {len(values)} rounds"
        rows.append(Row(name, statistics.median(values), compared[name][1], detail))
    print_table(rows)
    sys.exit(0 if all(row.ok for row in rows) else 1)


if __name__ == "__main__":
    main()
