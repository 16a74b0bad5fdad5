"""Vendors' wheels of vLLM plugins, from the package index and untouched, through the bridge.

'make test-vendor-wheels' fetches the wheels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.vllm_source import CACHE
from torch import Tensor
from torch.nn import functional as F

WHEELS = {"pace-vllm": "1.3.0", "vllm-spark2-5-plugin": "0.1.0"}
"""Distributions, with the versions that are tested."""

SERVE = """
import collections, json, sys
import torch
from opgraft import LLM, SamplingParams, current_platform

PROMPTS = ["What is gravity?", "The capital of France is"]
llm = LLM("smollm2", dtype="bfloat16", **json.loads(sys.argv[1]))
calls = collections.Counter()


class Counted:
    def __init__(self, name, op):
        self.name, self.op = name, op

    def __call__(self, *arguments):
        calls[self.name] += 1
        return self.op(*arguments)


for name in sys.argv[2:]:
    setattr(torch.ops.pace, name, Counted(name, getattr(torch.ops.pace, name)))
outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0))
tokens = [list(output.outputs[0].token_ids) for output in outputs]
print(json.dumps({"platform": current_platform().name, "tokens": tokens, "calls": calls}))
"""

ANSWER = """
import json, sys
from opgraft import LLM, SamplingParams

prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(sys.argv[2])]
greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
with LLM(sys.argv[1], dtype="float32", **{"load.progress": False, "cache.num_blocks": 400}) as llm:
    print(json.dumps([list(each.outputs[0].token_ids) for each in llm.generate(prompts, greedy)]))
"""

WITHOUT_AVX512 = """
import pace_vllm


def register():
    # What pace_vllm.register does, but for its question whether the processor has AVX-512 with bf16.
    pace_vllm._init_logging()
    pace_vllm._load_pace_native()
    return "pace_vllm.platform.PacePlatform"
"""

NORMS = ("rmsnorm", "fused_add_rmsnorm")
LINEAR = "libxsmmlinear_plain"


def wheel(name: str) -> Path:
    """The folder in which a wheel is installed."""
    folder = CACHE / "opgraft/vendor-wheels" / f"{name}=={WHEELS[name]}"
    if not (folder / "complete").is_file():
        pytest.skip(f"{name} {WHEELS[name]} is not here; make test-vendor-wheels fetches it")
    return folder


def has_avx512_bf16() -> bool:
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] == "flags"), ""
    )
    return {"avx512f", "avx512_bf16"} <= set(flags.split())


needs_avx512_bf16 = pytest.mark.skipif(
    not has_avx512_bf16(),
    reason="pace-vllm's register() returns None, and its norms end the process by an illegal instruction: this "
    "processor has no AVX-512 with bf16",
)


@pytest.fixture
def serve(built_plugin: Callable[[str], Path], site: Any, tmp_path: Path) -> Callable[..., Any]:
    """Answer two prompts in a process that has some wheels, and count calls of kernels."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    bridge = built_plugin("opgraft-vllm-bridge")

    def run(
        *wheels: Path, counted: Sequence[str] = (), platform: str | None = None, **settings: Any
    ) -> Any:
        path = os.pathsep.join(map(str, (site.folder, bridge, *wheels)))
        result = subprocess.run(
            [sys.executable, str(script), json.dumps(settings), *counted],
            env={**os.environ, "PYTHONPATH": path}
            | ({"OPGRAFT_PLATFORM": platform} if platform else {}),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run


@needs_avx512_bf16
def test_pace_serves_smollm2(serve: Callable[..., Any]) -> None:
    """Its 61 norms, 120 linear layers and its head run in every step, and answer as opgraft's own do."""
    served = serve(wheel("pace-vllm"), counted=(*NORMS, LINEAR))
    steps = served["calls"]["rmsnorm"]
    assert served["platform"] == "pace"
    assert steps > 0
    assert served["calls"] == {
        "rmsnorm": steps,
        "fused_add_rmsnorm": 60 * steps,
        LINEAR: 121 * steps,
    }
    assert served["tokens"] == serve()["tokens"]


def test_pace_serves_what_this_processor_can_run(serve: Callable[..., Any], site: Any) -> None:
    """Without its question for AVX-512, its linear layers and its head run, and answer as opgraft's own do."""
    points = {"vllm.platform_plugins": ["pace_anyway = pace_anyway:register"]}
    site.install("pace-anyway", {"pace_anyway.py": WITHOUT_AVX512}, points, requires=())
    served = serve(
        wheel("pace-vllm"),
        counted=(*NORMS, LINEAR),
        platform="pace_anyway",
        compilation_config={"custom_ops": ["-RMSNorm"]},
    )
    assert served["platform"] == "pace_anyway"
    assert served["calls"].keys() == {LINEAR}
    assert served["calls"][LINEAR] % 121 == 0
    assert served["tokens"] == serve()["tokens"]


def test_pace_says_why_it_is_left_out(built_plugin: Callable[[str], Path], cli: Any) -> None:
    """Where its own question for the processor is answered by no, its function finds no device."""
    path = os.pathsep.join(map(str, (built_plugin("opgraft-vllm-bridge"), wheel("pace-vllm"))))
    decision = json.loads(cli("detect", "--json", PYTHONPATH=path).stdout)["decision"]
    (pace,) = [each for each in decision["candidates"] if each["name"] == "pace"]
    assert pace["accepted"] == has_avx512_bf16()
    if not has_avx512_bf16():
        assert pace["reason"].startswith("pace_vllm:register finds no device")


SPARK = {
    "architectures": ["Spark2_5ForCausalLM"],
    "model_type": "spark2_5",
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
"""A small model. Three layers of four see 4 tokens; the fourth sees all and rotates 4 of 16 elements."""


def spark_weights(*, merged: bool) -> dict[str, Tensor]:
    """Random weights, the same ones with merged projections and without."""
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * 0.2

    found = {
        "model.embedding.weight": matrix(128, 64) * 5,
        "model.norm.weight": 1 + matrix(64),
        "lm_head.weight": matrix(128, 64),
    }
    for index in range(4):
        layer = f"model.layers.{index}."
        rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
        parts = {name: matrix(count, 64) for name, count in rows.items()}
        if merged:
            parts = {"q_k_v_proj": torch.cat(list(parts.values()))}
        parts |= {"g_proj": matrix(4, 64), "out_proj": matrix(64, 64)}
        found |= {f"{layer}self_attn.{name}.weight": part for name, part in parts.items()}
        mlp = {"gate_proj": matrix(96, 64), "up_proj": matrix(96, 64), "down_proj": matrix(64, 96)}
        found |= {f"{layer}mlp.{name}.weight": part for name, part in mlp.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = 1 + matrix(64)
    return found


def rotated(x: Tensor, base: float, size: int) -> Tensor:
    """Heads ``[tokens, heads, 16]`` with their first elements rotated by their position."""
    angles = (
        torch.arange(len(x)).outer(base ** (-torch.arange(0, size, 2) / size)).double()[:, None]
    )
    first, second, rest = x.split([size // 2, size // 2, 16 - size], -1)
    turned = (
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    )
    return torch.cat([*turned, rest], -1)


def spark_logits(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The scores of the token after some others, in float64 and by the formulas alone."""
    weights = {name.removesuffix(".weight"): each.double() for name, each in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[name]

    hidden = weights["model.embedding"][tokens]
    ago = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    for index in range(4):
        layer = f"model.layers.{index}."
        window, base, size = (256, 5e6, 4) if index == 3 else (4, 1e4, 16)
        x = norm(hidden, layer + "input_layernorm")
        query, key, value = (
            (x @ weights[f"{layer}self_attn.{name}_proj"].T).unflatten(-1, (-1, 16))
            for name in "qkv"
        )
        query, key = rotated(query, base, size), rotated(key, base, size).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / 4
        seen = scores.masked_fill((ago < 0) | (ago >= window), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", seen, value.repeat_interleave(2, 1))
        gate = (x @ weights[layer + "self_attn.g_proj"].T).sigmoid()[..., None]
        hidden = hidden + (attended * gate).flatten(1) @ weights[layer + "self_attn.out_proj"].T
        x = norm(hidden, layer + "post_attention_layernorm")
        gate, up = (x @ weights[f"{layer}mlp.{name}_proj"].T for name in ("gate", "up"))
        hidden = hidden + (F.gelu(gate) * up) @ weights[layer + "mlp.down_proj"].T
    return norm(hidden[-1], "model.norm") @ weights["lm_head"].T


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "apart"])
def test_a_public_model_is_served(
    built_plugin: Callable[[str], Path], site: Any, tmp_path: Path, merged: bool
) -> None:
    """vllm-spark2-5-plugin's model, untouched, answers as its formulas do: a window, a gate, two rotations."""
    prompts = [[5, 9, 4, 7, 11, 30, 22], [8, 3]]
    expected = []
    weights = spark_weights(merged=False)
    for prompt in prompts:
        tokens = [*prompt]
        for _ in range(8):
            tokens.append(int(spark_logits(weights, tokens).argmax()))
        expected.append(tokens[len(prompt) :])
    (tmp_path / "config.json").write_text(json.dumps(SPARK))
    save_file(spark_weights(merged=merged), tmp_path / "model.safetensors")
    folders = (site.folder, built_plugin("opgraft-vllm-bridge"), wheel("vllm-spark2-5-plugin"))
    result = subprocess.run(
        [sys.executable, "-c", ANSWER, str(tmp_path), json.dumps(prompts)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == expected
