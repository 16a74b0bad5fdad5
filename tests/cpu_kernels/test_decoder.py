"""The layers of a decoder in one call: the bits that their modules give, and the modules where something is unusual."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opgraft.config import CacheConfig, CompilationConfig, QuantizationSettings
from opgraft.config.sections import LoRAConfig
from opgraft.engine.core import EngineCore
from opgraft.engine.lora.request import LoRARequest
from opgraft.ops.decoder_plan import DecoderPlan
from support.engines import prompts, recorded, serve, settings
from support.random_decoders import LLAMA3, written
from torch import Tensor, nn

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "vocab_size": 192,
    "head_dim": 32,
    "num_key_value_heads": 2,
}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Logits = dict[Any, Tensor]


class Served:
    """An engine whose plan is watched: how many calls it answered, and how many it left to the modules."""

    def __init__(self, folder: Path, dtype: str = "float32", **sections: Any) -> None:
        given = settings(folder)
        model = dataclasses.replace(given.model, dtype=dtype)
        whole = {"model": model, "cache": CacheConfig(block_size=16, num_blocks=40), **sections}
        self.core = EngineCore(dataclasses.replace(given, **whole))
        self.stack: Any = self.core.executor.worker.runner.model.model
        self.answered = self.left = 0
        self.plan, run = self.stack.plan, self.stack.plan.run

        def watched(*args: Any) -> Any:
            result = run(*args)
            self.answered, self.left = (
                self.answered + (result is not None),
                self.left + (result is None),
            )
            return result

        self.plan.run = watched

    def by_modules(self) -> Served:
        """Call the modules, as where no plugin replaces the plan."""
        self.stack.plan = object.__new__(DecoderPlan)
        return self

    def logits(self, *lengths: int, loras: Sequence[LoRARequest | None] = ()) -> Logits:
        """Serve prompts of these lengths at once, with adapters perhaps."""
        self.answered = self.left = 0
        pairs = [
            recorded(f"{number}", prompt, 6) for number, prompt in enumerate(prompts(*lengths))
        ]
        for (request, _), lora in zip(pairs, loras, strict=False):
            request.lora = lora
        serve(self.core, [request for request, _ in pairs])
        return {
            (number, key): row
            for number, (_, each) in enumerate(pairs)
            for key, row in each.logits.items()
        }


def expect_equal(ours: Logits, others: Logits) -> None:
    assert list(ours) == list(others)
    assert all(torch.equal(row, others[key]) for key, row in ours.items())


@pytest.fixture(autouse=True)
def any_number_of_tokens(request: pytest.FixtureRequest, kernels: Any) -> None:
    """The plan takes as many tokens as linear layers read the weight as it is for: on this path any number."""
    import opgraft_cpu_kernels

    if "path" not in request.fixturenames:
        if "avx512_bf16" not in opgraft_cpu_kernels.paths():
            pytest.skip("this CPU lacks avx512_bf16")
        opgraft_cpu_kernels.set_path("avx512_bf16")


@pytest.fixture
def folder(plugin: Path, tmp_path: Path) -> Path:
    written("Llama", tmp_path / "model", **SHAPE, **BIASES)
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bits_are_those_of_the_modules(folder: Path, dtype: str) -> None:
    """Alone and beside others, prompts and tokens after them; longer prompts are left to the modules."""
    ours, modules = Served(folder, dtype), Served(folder, dtype).by_modules()
    for lengths in ((1,), (3, 1, 9), (40,)):
        expect_equal(ours.logits(*lengths), modules.logits(*lengths))
        assert ours.answered >= 5
    assert ours.left == (dtype == "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_many_tokens_as_the_path_takes(folder: Path, dtype: str, path: str) -> None:
    """On each path the plan has the calls of few tokens, and the modules all others, with the same bits."""
    from opgraft_cpu_kernels import linear

    limit = linear.FEW.get((path, getattr(torch, dtype)), 0)
    ours, modules = Served(folder, dtype), Served(folder, dtype).by_modules()
    expect_equal(ours.logits(6), modules.logits(6))
    assert (ours.answered > 0, ours.left > 0) == (limit > 0, limit < 6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters(folder: Path, tmp_path: Path, dtype: str, path: str) -> None:
    """The plan adds the adapters of requests as the modules do, and rows beside them keep their bits."""
    from opgraft_cpu_kernels import linear
    from support import adapters

    loras = [
        LoRARequest(f"{number}", number, str(saved))
        for number, targets in enumerate((ADAPTED, ["v_proj", "down_proj"]), 1)
        for saved in [
            adapters.saved_adapter(folder, tmp_path / f"{number}", number, target_modules=targets)
        ]
    ]
    given = [None, loras[0], loras[1], loras[0]]
    served = [Served(folder, dtype, lora=LoRAConfig(enabled=True)) for _ in range(2)]
    ours, modules = served[0], served[1].by_modules()
    results = [each.logits(2, 1, 2, 1, loras=given) for each in (ours, modules)]
    expect_equal(*results)
    # The steps after that of the prompts have a token of each of the four requests.
    assert (ours.answered > 0) == (linear.FEW.get((path, getattr(torch, dtype)), 0) >= 4)
    plain = ours.logits(2, 1, 2, 1)
    if ours.answered:
        assert not ours.plan._bound.additions.matrices, "matrices of adapters stay without requests"
    assert plain.keys() != results[0].keys()
    # The first request has none.
    expect_equal(
        *({key: row for key, row in each.items() if not key[0]} for each in (plain, results[0]))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_who_computes_a_piece(
    plugin: Path, tmp_path: Path, dtype: str
) -> None:
    """One thread, two and five give the same bits, also while other processes hold up some of them."""
    written("Llama", tmp_path / "wide", **{**SHAPE, "intermediate_size": 4096}, **BIASES)
    served, threads = Served(tmp_path / "wide", dtype), torch.get_num_threads()
    logits = []
    command = [sys.executable, "-c", "while True: pass"]
    others: list[subprocess.Popen[bytes]] = []
    try:
        for count in (1, 2, 5, 2):
            torch.set_num_threads(count)
            logits.append([served.logits(3, 40, 7), served.logits(5)])
            assert (served.answered > 0, served.left) == (True, 0)
            if count == 5 and not others:
                others += [subprocess.Popen(command) for _ in range(2)]
                logits.append([served.logits(3, 40, 7), served.logits(5)])
    finally:
        torch.set_num_threads(threads)
        for process in others:
            process.kill()
            process.wait()
    for each in logits[1:]:
        for ours, first in zip(each, logits[0], strict=True):
            expect_equal(ours, first)


@pytest.mark.parametrize("method", ["int8", "int8_dynamic", "int4"])
def test_quantized_weights(folder: Path, method: str) -> None:
    """Weights of 8 and of 4 bits are those that the modules compute with."""
    quantized = QuantizationSettings(method=method)
    ours, modules = (Served(folder, quantization=quantized) for _ in range(2))
    expect_equal(ours.logits(3, 5), modules.by_modules().logits(3, 5))
    assert (ours.answered > 0, ours.left) == (True, 0)


def test_weights_in_12_bits(folder: Path) -> None:
    """Layers, embedding and head in 12 bits give the bits of the plain model, in one call too."""
    tied = {"model.embed_tokens": "lossless12"}
    stored = QuantizationSettings(method="lossless12", by_prefix=tied)
    plain = Served(folder, "bfloat16")
    ours, modules = (Served(folder, "bfloat16", quantization=stored) for _ in range(2))
    expected = plain.logits(3, 40, 50)
    expect_equal(ours.logits(3, 40, 50), expected)
    expect_equal(modules.by_modules().logits(3, 40, 50), expected)
    assert (ours.answered > 0, ours.left) == (True, 0)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("Mistral", {"sliding_window": 5}),
        ("Qwen2", {}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Qwen3", {}),
    ],
)
def test_families(plugin: Path, tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    """A window and biases are in the plan; layers with norms of query and key, or other ropes, are called."""
    written(family, tmp_path, **SHAPE, **values)
    ours, modules = Served(tmp_path), Served(tmp_path).by_modules()
    expect_equal(ours.logits(12), modules.logits(12))
    planned = family in ("Mistral", "Qwen2")
    assert (ours.answered > 0, ours.left > 0) == (planned, not planned)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] // 2] * 0.5


def _replace_module(stack: Any) -> None:
    stack.layers[1].mlp.act_fn = Halved()


def _replace_layer(stack: Any) -> None:
    stack.layers[1] = Nothing()


def _replace_layers(stack: Any) -> None:
    stack.layers = nn.ModuleList([*stack.layers][:-1])


class Nothing(nn.Module):
    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        return hidden_states, residual


def _replace_forward(stack: Any) -> None:
    stack.layers[2].self_attn.o_proj.forward = lambda x: x * 2


def _replace_weight(stack: Any) -> None:
    stack.layers[0].mlp.down_proj.weight = nn.Parameter(
        stack.layers[0].mlp.down_proj.weight * 2, requires_grad=False
    )


def _write_weight(stack: Any) -> None:
    stack.layers[0].mlp.down_proj.weight.data.mul_(2)


def _pack(stack: Any) -> None:
    stack.layers[0].mlp.down_proj.hold_packed()


def _set_eps(stack: Any) -> None:
    stack.layers[2].input_layernorm.variance_epsilon = 0.5


CHANGES = (
    *(_replace_module, _replace_layer, _replace_layers, _replace_forward),
    *(_replace_weight, _write_weight, _pack, _set_eps),
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_requests(folder: Path, change: Callable[[Any], None]) -> None:
    """What is changed after the layers were bound holds for the next request, also for one from a reused prefix."""
    ours, modules = Served(folder), Served(folder).by_modules()
    before, _ = ours.logits(17), modules.logits(17)
    for served in (ours, modules):
        change(served.stack)
    after = ours.logits(17)
    expect_equal(after, modules.logits(17))
    assert (
        any(key not in before or not torch.equal(row, before[key]) for key, row in after.items())
        or change is _pack
    )


def test_a_change_before_a_prompt_that_the_modules_compute(folder: Path) -> None:
    """The prompt is too long for the plan, and the steps behind it continue; they have the change all the same."""
    import opgraft_cpu_kernels

    opgraft_cpu_kernels.set_path("avx512")
    ours, modules = Served(folder), Served(folder).by_modules()
    for served in (ours, modules):
        served.logits(17)
        _replace_weight(served.stack)
    expect_equal(ours.logits(47), modules.logits(47))
    assert ours.answered > 0
    assert ours.left > 0


def test_hooks(folder: Path) -> None:
    """A hook is called from the next step on, with one of a request's tokens as well; without it the plan is back."""
    served, seen = Served(folder), []
    served.logits(3)
    assert served.left == 0
    act = served.stack.layers[1].mlp.act_fn
    request, recorder = recorded("hooked", prompts(3)[0], 6)
    served.core.add([request])
    for _ in range(3):
        served.core.step()
    with act.register_forward_hook(lambda *_: seen.append(len(recorder.logits))):
        while served.core.has_work:
            served.core.step()
    assert len(seen) == 3
    served.logits(3)
    assert (served.answered > 0, served.left) == (True, 0)
    with nn.modules.module.register_module_forward_hook(lambda *_: seen.append(0)):
        served.logits(3)
    assert served.answered == 0


def test_switched_off(folder: Path) -> None:
    """A kernel that settings switch off does not run in the plan either."""
    off = Served(folder, compilation_config=CompilationConfig(custom_ops=["-rms_norm"]))
    off.logits(3)
    assert off.answered == 0


def test_gradients_and_calls_without_a_batch(folder: Path) -> None:
    """Where gradients are recorded, and where no batch is set, the modules are called."""
    served = Served(folder)
    ids, positions = torch.tensor([3, 4]), torch.arange(2)
    with torch.inference_mode():
        served.stack(ids, positions)
    served.stack(ids, positions)
    assert (served.answered, served.left) == (0, 2)


def test_copies_bind_anew(folder: Path) -> None:
    """A copy of a model computes with its own weights."""
    served = Served(folder)
    served.logits(3)
    del served.plan.run
    copied = copy.deepcopy(served.stack)
    assert "_bound" in vars(served.plan)
    assert "_bound" not in vars(copied.plan)


def test_what_the_library_refuses(kernels: Any) -> None:
    """Wrong layers say what is wrong."""
    decoder = torch.classes.opgraft_cpu_kernels.Decoder()
    weight = torch.ones(4, 4)
    maps = [("linear", [weight, None])] * 4
    given = (weight[0], 1e-6, weight[0], 1e-6)
    with pytest.raises(ValueError, match="a linear layer by sparse with 2 tensors"):
        decoder.add_layer(
            *given, [("sparse", maps[0][1])] * 4, [1, 1, 4], 1.0, None, None, None, True, True
        )
    with pytest.raises(ValueError, match="a layer has 3 maps and 3 sizes"):
        decoder.add_layer(*given, maps[:3], [1, 1, 4], 1.0, None, None, None, True, True)
    decoder.add_layer(*given, maps, [1, 1, 4], 1.0, None, None, None, True, True)
    with pytest.raises(ValueError, match="0 layers have caches"):
        decoder.run(
            torch.arange(1),
            weight[:1],
            [],
            [],
            [],
            [],
            torch.tensor([0, 1]),
            torch.tensor([1]),
            None,
            [],
            None,
        )


@pytest.fixture
def number_of_threads() -> Iterator[Callable[[int], None]]:
    """What sets it; the former one is restored."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", [None, "int4"])
@torch.inference_mode()
def test_calls_do_not_disturb_each_other(
    folder: Path, method: str | None, number_of_threads: Any
) -> None:
    """The bits are the same with any number of threads; results stay when others follow, and so do those after errors.

    Memory of what is between kernels is used again from call to call.
    """
    served = Served(folder, quantization=QuantizationSettings(method=method))
    served.logits(3)
    calls: list[Any] = []
    bound, decoder = served.plan._bound, served.plan._bound.decoder
    bound.decoder = SimpleNamespace(
        run=lambda *arguments: (calls.append(arguments), decoder.run(*arguments))[1]
    )
    served.logits(3)
    arguments = calls[-1]
    expected = [each.clone() for each in decoder.run(*arguments)]
    results = []
    for threads in (1, 2, 3):
        number_of_threads(threads)
        beyond = [slots + 10**6 for slots in arguments[4]]
        with pytest.raises(ValueError, match="slots has 100"):
            decoder.run(*arguments[:4], beyond, *arguments[5:])
        results += [decoder.run(*arguments) for _ in range(3)]
    assert all(
        torch.equal(*pair) for result in results for pair in zip(result, expected, strict=True)
    )
    with torch.inference_mode(mode=False), torch.no_grad():
        plain = decoder.run(
            *(each.clone() if isinstance(each, Tensor) else each for each in arguments)
        )
    assert not any(each.is_inference() for each in plain)


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_caches_of_codes(folder: Path, cache: str) -> None:
    """A cache of 8 bits goes through the plan, and gives the bits that the modules give."""
    sections = {"cache": CacheConfig(block_size=16, num_blocks=40, dtype=cache)}
    ours, modules = (Served(folder, **sections) for _ in range(2))
    expect_equal(ours.logits(3, 20), modules.by_modules().logits(3, 20))
    assert (ours.answered > 0, ours.left) == (True, 0)


def remark(served: Served) -> str:
    (plan,) = [row for row in served.core.explain().classes if row.name == "decoder_plan"]
    assert plan.provider.name == "opgraft-cpu-kernels"
    return plan.remark


def test_explain_says_how_often_the_plan_ran_and_why_not(folder: Path) -> None:
    """The plan counts its calls, and names the module with a hook and the part that was replaced."""
    served = Served(folder)
    assert remark(served) == "not called yet"
    served.logits(3)
    assert remark(served) == f"{served.answered} of {served.answered} calls computed in one"
    with served.stack.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None):
        served.logits(3)
    assert f"; {served.left} by the modules, as layers.1.mlp.down_proj has a hook" in remark(served)
    _replace_module(served.stack)
    served.logits(3)
    assert f"; {served.left} by the modules, as act_fn of layers.1 is a Halved" in remark(served)


@pytest.mark.parametrize(
    ("change", "sections", "reason"),
    [
        (_replace_layer, {}, "layers.1 is made of other parts"),
        (
            _replace_forward,
            {},
            "o_proj of layers.2 was changed: its forward was replaced on the instance",
        ),
        (_pack, {}, "down_proj of layers.0 has a packed weight"),
        (
            None,
            {"compilation_config": CompilationConfig(custom_ops=["-rms_norm"])},
            "before_attention of layers.0 runs RMSNorm.forward_native of opgraft ",
        ),
        (
            None,
            {"cache": CacheConfig(block_size=8, num_blocks=40)},
            "blocks have 8 tokens, no multiple of 16",
        ),
    ],
)
def test_reasons_of_the_plan(
    folder: Path, change: Any, sections: dict[str, Any], reason: str
) -> None:
    """What keeps the layers from the library is said by part and layer."""
    served = Served(folder, **sections)
    if change:
        change(served.stack)
    served.logits(3)
    assert served.answered == 0
    assert reason in remark(served)


def test_a_prompt_of_any_length_is_computed_at_once(folder: Path) -> None:
    """Where the kernels read the weight as it is for any number of rows, the plan takes prompts too."""
    import opgraft_cpu_kernels

    if "avx512_bf16" not in opgraft_cpu_kernels.paths():
        pytest.skip("this CPU lacks avx512_bf16")
    opgraft_cpu_kernels.set_path("avx512_bf16")
    served = Served(folder)
    served.logits(63, 63)
    assert (served.answered > 0, served.left) == (True, 0)


def test_a_call_of_many_tokens_is_counted_by_its_reason(folder: Path) -> None:
    """A prompt with more tokens than the plan takes is one call by the modules."""
    import opgraft_cpu_kernels

    opgraft_cpu_kernels.set_path("avx512")
    served = Served(folder)
    served.logits(63, 63)
    assert served.left == 1
    assert "1 by the modules, as they have more than" in remark(served)


def test_the_page_has_the_most_tokens_of_the_plan(kernels: Any) -> None:
    """The table by path in the documentation is what the kernels are for."""
    from opgraft_cpu_kernels import linear

    text = (Path(__file__).parents[2] / "docs/explanation/engine.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| `(amx|avx512\w*|avx2)` \| (\w+)(?: tokens| number)? \| (\w+)(?: number)? \| (\w+)(?: number)? \|$",
        text,
        re.M,
    )
    dtypes = torch.float32, torch.bfloat16, torch.float16
    most = {
        (path, dtype): each for path, *row in table for dtype, each in zip(dtypes, row, strict=True)
    }
    assert most == {
        key: "any" if each == linear.UNLIMITED else str(each) for key, each in linear.FEW.items()
    }


def test_explain_knows_what_attention_runs(folder: Path) -> None:
    """Attention is the plugin's, and writes and reads pages by itself: its children are not said to run."""
    rows = [row for row in Served(folder).core.explain().rows if ".attn" in row.path]
    assert {(row.op, row.kernel, row.provider.name) for row in rows if row.runs} == {
        ("attention", "Attention.forward", "opgraft-cpu-kernels")
    }
    assert {row.op for row in rows if not row.runs} == {
        "scaled_dot_product_attention",
        "write_kv_cache",
        "paged_attention",
    }


def test_explain_names_the_form_of_linear_layers(folder: Path) -> None:
    """What multiplies by the weights is the kernel of a form, which has a row for each layer that calls it."""
    rows = [row for row in Served(folder).core.explain().rows if row.op == "linear"]
    assert len(rows) == 4 * 3 + 1
    assert {(row.kernel, row.provider.name) for row in rows} == {
        ("Linear.forward_cpu", "opgraft-cpu-kernels")
    }
