"""The engine on torch_xla, whose CPU client compiles and runs the programs of a TPU. Run by ``make test-xla``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import current_platform, set_config
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import ConfigError
from opgraft.ops.attention.padded import PaddedAttention
from support.engines import prompts, replaced, serve, settings
from support.random_decoders import written

if os.environ.get("PJRT_DEVICE") != "CPU":
    pytest.skip(
        "runs on XLA's CPU client: set PJRT_DEVICE=CPU, as make test-xla does",
        allow_module_level=True,
    )
pytest.importorskip(
    "torch_xla", reason="torch_xla is not installed here; make test-xla runs these tests"
)

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 16, "num_blocks": 60}


@pytest.fixture(autouse=True)
def tpu(fresh_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU platform, asked for by name."""
    monkeypatch.setenv("OPGRAFT_PLATFORM", "tpu")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xla") / "smollm2"
    written("Llama", folder, **SMOLLM2)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xla") / "tiny"
    written(
        "Llama",
        folder,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_size=64,
    )
    return folder


def started(folder: Path, max_model_len: int, devices: int = 1) -> EngineCore:
    """An engine with the settings of its platform; each length makes programs that XLA has not compiled before."""
    given = settings(
        folder, max_model_len=max_model_len, **{**LIMITS, "max_num_seqs": 12 if devices == 1 else 8}
    )
    strict = {"compilation_config": {"fail_on_recompile": True}}
    with set_config(replaced(given, parallel={"devices_per_rank": devices}, **strict)):
        return EngineCore()


def requests() -> list[Request]:
    """Prompts in chunks, decodes, siblings, and requests that are sampled on the host."""
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    made = [
        Request(f"r{i}", prompt, SamplingParams(**greedy))
        for i, prompt in enumerate(prompts(19, 3, 1, 8, 30))
    ]
    drawn = SamplingParams(
        temperature=0.8, top_p=0.9, seed=5, max_tokens=5, ignore_eos=True, logprobs=2
    )
    siblings = Request(
        "n", prompts(6)[0], SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True)
    ).split()
    return [*made, Request("drawn", prompts(12)[0], drawn), *siblings]


def tokens(core: EngineCore) -> dict[str, list[int]]:
    asked = requests()
    serve(core, asked)
    return {each.request_id: each.output for each in asked}


def on_the_cpu(
    folder: Path, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[int]]:
    """The tokens of the engine on the CPU's own platform."""
    monkeypatch.setenv("OPGRAFT_PLATFORM", "cpu")
    opgraft.reset()
    expected = tokens(EngineCore(settings(folder, max_model_len=max_model_len, **LIMITS)))
    monkeypatch.setenv("OPGRAFT_PLATFORM", "tpu")
    opgraft.reset()
    return expected


def places(core: EngineCore) -> list[int]:
    """Where the caches lie in memory."""
    import torch_xla

    return [
        torch_xla._XLAC._unsafe_buffer_pointer(cache)
        for cache in core.executor.worker.runner.tensors
    ]


def test_the_whole_engine_on_the_shape_of_smollm2(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of the CPU; XLA compiles a program for each shape and one that copies blocks, ahead; the
    cache stays where it is, however many steps write to it."""
    expected = on_the_cpu(smollm2, 56, monkeypatch)
    compilations, counts = current_platform().compilations, []
    opgraft.load_plugins()
    from opgraft.platforms.tpu.engine import TpuModelRunner

    compile_model = TpuModelRunner.compile_model

    def counted(runner: TpuModelRunner) -> None:
        before = compilations()
        compile_model(runner)
        counts.append(compilations() - before)

    monkeypatch.setattr(TpuModelRunner, "compile_model", counted)
    core = started(smollm2, 56)
    runner = core.executor.worker.runner
    assert [(s.sequences, s.tokens) for s in runner.shapes] == [(8, 1), (16, 1), (1, 8), (1, 16)]
    assert counts == [len(runner.shapes) + 1]
    before, where = compilations(), places(core)
    assert tokens(core) == expected
    assert compilations() == before
    assert places(core) == where
    table = {row.name: row for row in core.explain().classes}
    assert table["model_runner"].remark == "4 shapes are compiled by openxla"
    assert table["worker"].cls.endswith("TpuWorker")


@pytest.fixture
def pallas(plugin: Callable[[str], None]) -> None:
    pytest.importorskip("jax", reason="jax is not installed here; make test-xla runs these tests")
    plugin("opgraft-pallas")


def test_the_engine_attends_in_pallas(
    pallas: None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plugin the kernel is part of each program, and the tokens are the same."""
    expected = on_the_cpu(tiny, 52, monkeypatch)
    core = started(tiny, 52)
    (layer, *_) = core.executor.worker.runner.layout.layers.values()
    assert layer.op_class.__name__ == "PallasPagedAttention"
    assert tokens(core) == expected


def test_xlas_cpu_client_joins_no_other_process(tiny: Path) -> None:
    """The engine refuses ranks that share layers, before a worker starts, with the client's reason."""
    split = replaced(settings(tiny, **LIMITS), parallel={"tensor": 2})
    with pytest.raises(ConfigError, match="XLA's CPU client joins no other process"):
        EngineCore(split)


PAGES = {  # sequences, rows, heads, key heads, blocks of a sequence, window, cap
    "single tokens": (5, 1, 6, 2, 3, None, None),
    "a prompt": (1, 40, 6, 2, 7, None, None),
    "rows of several tiles, window and cap": (1, 100, 6, 2, 17, 5, 2.0),
    "prompts": (2, 9, 4, 4, 3, 5, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PAGES)
def test_the_kernel_over_pages_agrees_with_its_native_form(
    pallas: None, case: str, dtype: torch.dtype
) -> None:
    """Interpreted, it gives what the definition gives in float64; what no token sees may be NaN."""
    from opgraft_pallas.op import paged_attention

    sequences, rows, heads, kv_heads, width, window, cap = PAGES[case]
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(sequences, rows, heads, 16, generator=generator).to(dtype)
    cache = torch.randn(sequences * width + 1, 2, kv_heads, 8, 16, generator=generator).to(dtype)
    table = torch.randperm(sequences * width, generator=generator).view(sequences, width).int()
    lens = torch.randint(rows, width * 8 + 1, (sequences,), generator=generator).int()
    first = lens - rows
    lens -= rows // 3  # the last rows are padding
    for row in range(sequences):
        unseen = (
            table[row].repeat_interleave(8)[lens[row] :],
            torch.arange(width * 8)[lens[row] :] % 8,
        )
        cache[unseen[0].long(), :, :, unseen[1]] = float("nan")
    layer = PaddedAttention(heads, 16, 0.3, kv_heads, window, cap)
    exact = layer.attend_rows(query.double(), cache.double(), table, first, lens)
    found = paged_attention(
        *(x.to("xla") for x in (query, cache, table, first, lens)), 0.3, window, cap
    ).cpu()
    real = first[:, None] + torch.arange(rows) < lens[:, None]
    atol, rtol = (1e-5, 1.3e-6) if dtype == torch.float32 else (2e-2, 1.6e-2)
    torch.testing.assert_close(found[real].double(), exact[real], atol=atol, rtol=rtol)


@pytest.mark.parametrize("rows", [1, 256])
def test_the_kernel_over_pages_lowers_for_a_tpu(pallas: None, rows: int) -> None:
    """Without the interpreter it becomes a program for a TPU, as far as that can be told without one."""
    import jax
    from jax import export
    from opgraft_pallas.paged import Settings, paged_attention

    sequences = 8 if rows == 1 else 1
    shapes = [
        (sequences, rows, 9, 64),
        (50, 2, 3, 32, 64),
        (sequences, 16),
        (sequences,),
        (sequences,),
    ]
    given = [
        jax.ShapeDtypeStruct(shape, "bfloat16" if len(shape) > 3 else "int32") for shape in shapes
    ]
    function = jax.jit(paged_attention(Settings(0.125), False))
    assert "tpu_custom_call" in export.export(function, platforms=["tpu"])(*given).mlir_module()


SPREAD = """
import json, sys
from pathlib import Path
from lanes.test_xla_engine import started, tokens
import torch_xla

core = started(Path(sys.argv[1]), 60, devices=4)
found = tokens(core)
runner = core.executor.worker.runner
sharding = torch_xla._XLAC._get_xla_sharding_spec
specs = {name: sharding(weight) for name, weight in runner.model.named_parameters()}
print(json.dumps([found, specs, sharding(runner.tensors[0]), torch_xla.runtime.global_runtime_device_count()]))
"""


def test_four_chips_as_one_process(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and cache lie divided on four devices, nothing is compiled in a step, and the tokens are the CPU's."""
    expected = on_the_cpu(tiny, 60, monkeypatch)
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    environ = {**os.environ, "CPU_NUM_DEVICES": "4", "PYTHONPATH": path}
    command = [sys.executable, "-c", SPREAD, str(tiny)]
    result = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found, specs, cache, devices = json.loads(result.stdout.splitlines()[-1])
    assert found == expected
    assert devices == 4
    assert specs["model.layers.0.self_attn.qkv_proj.weight"] == "{devices=[4,1]0,1,2,3}"
    assert specs["model.layers.1.mlp.down_proj.weight"] == "{devices=[1,4]0,1,2,3}"
    assert "replicated" in specs["model.norm.weight"] or not specs["model.norm.weight"]
    assert cache == "{devices=[1,1,4,1,1]0,1,2,3}"
