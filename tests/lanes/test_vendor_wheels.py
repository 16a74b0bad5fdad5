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
from support.vllm_source import CACHE

WHEELS = {"pace-vllm": "1.3.0"}
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

    def run(*wheels: Path, counted: Sequence[str] = (), **settings: Any) -> Any:
        path = os.pathsep.join(map(str, (site.folder, bridge, *wheels)))
        result = subprocess.run(
            [sys.executable, str(script), json.dumps(settings), *counted],
            env={**os.environ, "PYTHONPATH": path},
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
