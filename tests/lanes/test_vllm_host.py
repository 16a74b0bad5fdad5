"""opgraft's kernels in real vLLM, on SmolLM2: 'make test-vllm' installs vLLM for CPUs and asks this."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_kernels.conftest import installed as installed

REPOSITORY = Path(__file__).parents[2]
PEERS = REPOSITORY / "benchmarks/peers"
PYTHON = os.environ.get("VLLM_PYTHON", "")
LAYERS = 30

pytestmark = pytest.mark.skipif(not PYTHON, reason="'make test-vllm' installs vLLM for CPUs")

ONE = [[100 + 7 * token for token in range(16)]]
MANY = [[200 + 31 * request + 11 * token for token in range(8 + request)] for request in range(32)]

ON_LAYERS = """
import json, sys, tempfile, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.plugins import load_general_plugins

load_general_plugins()
from opgraft_vllm.report import REPORT
from vllm.model_executor.layers import activation, layernorm
from vllm.model_executor.layers.rotary_embedding import get_rope

config = VllmConfig(**json.loads(sys.argv[1]))
before = config.compute_hash()
with set_current_vllm_config(config), torch.inference_mode():
    norm = layernorm.RMSNorm(64)
    torch.nn.init.normal_(norm.weight)
    layers = {
        "norm": (norm, (torch.randn(5, 64),)),
        "sum and norm": (norm, (torch.randn(5, 64), torch.randn(5, 64))),
        "silu": (activation.SiluAndMul(), (torch.randn(5, 64),)),
        "gelu": (activation.GeluAndMul("tanh"), (torch.randn(5, 64),)),
        "rope": (get_rope(16, 128, True, {"rope_type": "default", "rope_theta": 1e4}, torch.float32),
                 (torch.arange(5), torch.randn(5, 64), torch.randn(5, 32))),
    }
    told = {}
    for name, (layer, inputs) in layers.items():
        copies = [x.clone() for x in inputs]
        ours, theirs = layer(*inputs), layer.forward_native(*copies)
        pairs = zip(ours, theirs) if isinstance(ours, tuple) else [(ours, theirs)]
        told[name] = max((a - b).abs().max().item() for a, b in pairs)
print(json.dumps({
    "differences": told,
    "calls": {row.told["op"]: row.calls for row in REPORT.rows},
    "classes": {row.told["op"]: row.told["classes"] for row in REPORT.rows},
    "left": REPORT.left,
    "key changed": before != config.compute_hash(),
    "key": config.compute_hash(),
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> str:
    """The folders with opgraft, opgraft-vllm and the CPU kernels, for another Python's path."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(["bash", REPOSITORY / "tools/site.sh", folder, "opgraft-vllm"], check=True)
    return os.pathsep.join(map(str, (folder, installed)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.append(str(PEERS))
    from checkpoints import write_safetensors

    written: Path = write_safetensors(tmp_path_factory.mktemp("checkpoint"), torch.float32)
    return written


Answers = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "report.json"


@pytest.fixture(scope="module")
def answers(site: str, checkpoint: Path, report: Path) -> Iterator[Answers]:
    """Answer one request and 32 in vLLM, with or without opgraft; then kill all of its processes."""

    @cache
    def ask(*, opgraft: bool, eager: bool) -> Any:
        variables = {"EAGER": "1"} if eager else {}
        if opgraft:
            written = report.with_stem("eager" if eager else "compiled")
            variables |= {"PYTHONPATH": site, "OPGRAFT_REPORT": str(written)}
        with subprocess.Popen(
            [PYTHON, PEERS / "with_vllm.py", checkpoint, "float32"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                assert process.stdout
                assert process.stdin
                assert process.stdout.readline(), "vLLM ended: see its messages"
                found = []
                for prompts in (ONE, MANY):
                    process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": 16}) + "\n")
                    process.stdin.flush()
                    found.append(json.loads(process.stdout.readline())["tokens"])
                return found
            finally:
                os.killpg(process.pid, signal.SIGKILL)

    yield ask
    ask.cache_clear()


def on_layers(site: str, config: dict[str, Any], **variables: str) -> Any:
    """Compare layers of vLLM that opgraft serves with vLLM's own definitions."""
    result = subprocess.run(
        [PYTHON, "-c", ON_LAYERS, json.dumps(config)],
        env={**os.environ, "PYTHONPATH": site, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_layers_compute_what_vllm_computes(site: str) -> None:
    """Norms, activations and rotary embeddings run opgraft's kernels, to float32's precision."""
    told = on_layers(site, {})
    assert max(told["differences"].values()) < 1e-5, told
    assert told["calls"]["rms_norm"] == 1
    assert told["calls"]["fused_add_rms_norm"] == 1
    assert told["calls"]["silu_and_mul"] == 1
    assert told["calls"]["gelu_and_mul"] == 1
    assert told["calls"]["rotary_embedding"] == 1


def test_what_is_replaced(site: str, tmp_path: Path) -> None:
    """Rotary embeddings with arithmetic of their own stay, and the report says so, in the place of an older one."""
    file = tmp_path / "report.json"
    file.write_text("of an earlier run")
    told = on_layers(site, {}, OPGRAFT_REPORT=str(file), OPGRAFT_PROVIDERS="silu_and_mul=native")
    classes = told["classes"]
    assert set(classes["rotary_embedding"]) == {
        "RotaryEmbedding",
        "DynamicNTKAlphaRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "Gemma4RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
    assert classes["rms_norm"] == classes["fused_add_rms_norm"] == ["RMSNorm"]
    assert {"Sampler", "FourierRotaryEmbedding"} <= told["left"].keys()
    written = json.loads(file.read_text())
    assert written["schema"] == "opgraft.vllm/1"
    assert written["left"] == told["left"]
    assert {row["op"]: row["calls"] for row in written["kernels"]} == told["calls"]


def test_an_unwritable_report_ends_nothing(site: str, tmp_path: Path) -> None:
    """Without a folder for the report, layers compute, and one line says why there is none."""
    told = on_layers(site, {}, OPGRAFT_REPORT=str(tmp_path / "none/report.json"))
    assert told["calls"]["rms_norm"] == 1


def test_opgraft_decides(site: str) -> None:
    """Providers and custom_ops of opgraft count in vLLM; so does vLLM's own word about a class."""
    by_opgraft = on_layers(site, {}, OPGRAFT_PROVIDERS="rms_norm=native")
    assert "rms_norm" not in by_opgraft["calls"]
    assert by_opgraft["calls"]["silu_and_mul"] == 1
    by_vllm = on_layers(site, {"compilation_config": {"custom_ops": ["all", "-rms_norm"]}})
    assert by_vllm["calls"]["rms_norm"] == 0
    assert by_vllm["calls"]["silu_and_mul"] == 1


def test_the_decisions_are_in_the_key_of_compiled_code(site: str) -> None:
    """vLLM's key changes with opgraft's kernels, and is another one for other kernels."""
    told, other = on_layers(site, {}), on_layers(site, {}, OPGRAFT_PROVIDERS="rms_norm=native")
    assert told["key changed"]
    assert told["key"] != other["key"]
    assert told["key"] == on_layers(site, {})["key"]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_vllm_answers_alike(answers: Answers, eager: bool) -> None:
    """One request and 32 get the greedy tokens that vLLM gives without opgraft."""
    assert answers(opgraft=True, eager=eager) == answers(opgraft=False, eager=eager)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_report_outlives_its_process(answers: Answers, report: Path, mode: str) -> None:
    """The calls of each kernel are in the file after all processes of vLLM were killed."""
    answers(opgraft=True, eager=mode == "eager")
    told = json.loads(report.with_stem(mode).read_text())
    calls = {row["op"]: row["calls"] for row in told["kernels"] if row["calls"]}
    steps = calls["rms_norm"]
    heads = calls["linear"] - 4 * LAYERS * steps
    # The step that warms up a compiled model has no attention.
    attended = steps - 1 if mode == "compiled" else steps
    assert steps > 32
    assert 32 <= heads <= steps
    assert calls == {
        "attention": LAYERS * attended,
        "rms_norm": steps,
        "fused_add_rms_norm": 2 * LAYERS * steps,
        "silu_and_mul": LAYERS * steps,
        "rotary_embedding": LAYERS * steps,
        "linear": 4 * LAYERS * steps + heads,
    }
