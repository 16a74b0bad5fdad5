"""Requests with LoRA adapters, compared with transformers and PEFT in float64."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_worker_process import process_of
from opgraft import LLM, LoRARequest, SamplingParams, ops
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.engine.lora.adapter_file import open_adapter
from opgraft.engine.request import Request
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.errors import CheckpointError, ConfigError, RequestError
from opgraft.kernels import form_called
from opgraft.ops import LogitsProcessor, QKVParallelLinear
from safetensors.torch import load_file, save_file
from support import adapters
from support.adapters import EVERYWHERE, PROMPTS
from support.random_decoders import LATENT
from torch.nn import functional

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore::UserWarning"),
    pytest.mark.usefixtures("warm_workers"),
]

ADAPTERS = {
    "attention": {},
    "everywhere": {"target_modules": EVERYWHERE, "r": 8, "seed": 2},
    "stable": {"use_rslora": True, "r": 3, "target_modules": ["gate_proj", "down_proj"], "seed": 3},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 6, "down_proj": 2},
        "alpha_pattern": {"k_proj": 3, r".*\.mlp\.up_proj": 20},
        "seed": 4,
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return adapters.saved_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of all adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapters.saved_adapter(base, root / name, **settings)
        for name, settings in ADAPTERS.items()
    }


@pytest.fixture(scope="module")
def answers(base: Path, folders: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    """The answers of PEFT to all prompts, by adapter; ``None`` stands for the base model."""
    wanted: dict[str | None, Any] = {None: None, **folders}
    return {name: adapters.expected(base, folder, PROMPTS) for name, folder in wanted.items()}


@pytest.fixture(scope="module")
def requests(folders: dict[str, Path]) -> dict[str, LoRARequest]:
    """A request for each adapter."""
    return {
        name: LoRARequest(name, number, str(folder))
        for number, (name, folder) in enumerate(folders.items(), 1)
    }


@pytest.fixture(scope="module")
def llm(base: Path) -> Any:
    """An engine that takes adapters."""
    with adapters.engine(base) as made:
        yield made


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_one_adapter(llm: Any, requests: Any, answers: Any, name: str | None) -> None:
    """Answers with an adapter are those of PEFT, and those without one those of the base model."""
    assert adapters.greedy(llm, PROMPTS, requests.get(name)) == answers[name]
    assert answers[name] != answers[None] or name is None


def test_many_adapters_in_a_batch(llm: Any, requests: Any, answers: Any) -> None:
    """Requests of one batch have adapters of their own, or none."""
    names = [*ADAPTERS, None]
    prompts = PROMPTS * len(names)
    wanted = [name for name in names for _ in PROMPTS]
    given = [requests.get(name) for name in wanted]
    # Mixed, so that requests of an adapter do not follow one another.
    order = sorted(range(len(prompts)), key=lambda place: place % len(PROMPTS))
    found = adapters.greedy(llm, [prompts[i] for i in order], [given[i] for i in order])
    expected = [answer for name in names for answer in answers[name]]
    assert found == [expected[i] for i in order]


@pytest.mark.parametrize("step", [1, -1], ids=["ascending", "descending"])
def test_first_adapters_of_an_engine(base: Path, folders: Any, answers: Any, step: int) -> None:
    """Adapters of other ranks and layers get their slots in one step."""
    names = list(ADAPTERS)[::step]
    given = [LoRARequest(name, number, str(folders[name])) for number, name in enumerate(names, 1)]
    with adapters.engine(base) as llm:
        found = adapters.greedy(llm, [PROMPTS[0]] * len(names), given)
    assert found == [answers[name][0] for name in names]


@pytest.mark.slow
def test_stages_order_adapters_alike(base: Path, tmp_path: Path) -> None:
    """Rows keep their adapters if only one stage of a pipeline has layers of an adapter."""
    settings = [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["gate_proj"], "layers_to_transform": [0]},
    ]
    given: list[LoRARequest] = []
    expected = []
    for number, changes in enumerate(settings, 1):
        folder = adapters.saved_adapter(base, tmp_path / str(number), number, **changes)
        given.append(LoRARequest(str(number), number, str(folder)))
        expected += adapters.expected(base, folder, PROMPTS[:1])
    assert expected[0] != expected[1]
    with adapters.engine(base, pipeline_parallel_size=2, enable_prefix_caching=False) as llm:
        for request, answer in zip(given, expected, strict=True):
            assert adapters.greedy(llm, PROMPTS[:1], request) == [answer]
        # Stages work at once, each on a part of the requests.
        assert adapters.greedy(llm, [PROMPTS[0]] * 8, given * 4) == expected * 4


def test_drafted_tokens(base: Path, requests: Any, answers: Any) -> None:
    """Drafts are verified with the adapter of their request, logits included."""
    speculation = {"speculation.method": "suffix", "speculation.exact": False}
    with adapters.engine(base, **speculation, **{"speculation.adaptive": False}) as llm:
        for name in ("everywhere", None, "attention", "everywhere"):
            assert adapters.greedy(llm, PROMPTS, requests.get(name)) == answers[name]
        assert llm.stats().counters.accepted_tokens


def test_blocks_of_another_adapter_are_not_reused(base: Path, requests: Any, answers: Any) -> None:
    """A prompt in the cache serves requests of the same adapter only."""
    prompts = [PROMPTS[2] * 6]
    expected = {
        name: adapters.expected(base, folder, prompts)
        for name, folder in ((None, None), ("attention", Path(requests["attention"].lora_path)))
    }
    with adapters.engine(base, block_size=8) as llm:
        for name in (None, "attention", None, "attention"):
            assert adapters.greedy(llm, prompts, requests.get(name)) == expected[name]
        counters = llm.stats().counters
        assert counters.prefix_hits == 2 * 40


def test_one_slot(base: Path, requests: Any, answers: Any) -> None:
    """With one slot, requests of several adapters run one adapter after another."""
    names = [None, *ADAPTERS, None, "attention"]
    with adapters.engine(base, max_loras=1) as llm:
        prompts = [PROMPTS[0]] * len(names)
        found = adapters.greedy(llm, prompts, [requests.get(name) for name in names])
    assert found == [answers[name][0] for name in names]


OTHERS = {
    "transformers": ("Llama", {"model.implementation": "transformers"}),
    "fused": ("Phi3", {}),
    "latent": ("DeepseekV3", {}),
    "states": ("Bamba", {}),
    "quantized": ("Llama", {"quantization": "int8"}),
    "tensor": ("Llama", {"tensor_parallel_size": 2}),
    "replicas": ("Llama", {"tensor_parallel_size": 4}),
    "pipeline": ("Llama", {"pipeline_parallel_size": 2}),
    "compiled": ("Llama", {"compilation_config": {"mode": 1, "backend": "eager"}}),
}
MAMBA_SIZES = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
SIZES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "latent": (LATENT, ["q_proj", "kv_a_proj_with_mqa", "o_proj"]),
    "states": (MAMBA_SIZES, ["in_proj", "out_proj", "q_proj", "gate_proj"]),
}
"""Further sizes, and the layers that the adapter changes."""

SLOW = ("states", "replicas", "pipeline", "compiled")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OTHERS],
)
def test_other_models(tmp_path: Path, case: str) -> None:
    """Layers of other models, and layers on several ranks, have adapters too."""
    architecture, settings = OTHERS[case]
    sizes, targets = SIZES.get(case, ({}, [*EVERYWHERE, "qkv_proj", "gate_up_proj"]))
    base = adapters.saved_base(tmp_path / "base", architecture, **sizes)
    folder = adapters.saved_adapter(base, tmp_path / "adapter", target_modules=targets)
    request = LoRARequest("one", 1, str(folder))
    with adapters.engine(base, **settings) as llm:
        given = [None] * len(PROMPTS) + [request] * len(PROMPTS)
        found = adapters.greedy(llm, PROMPTS * 2, given)
    plain = adapters.expected(base, None, PROMPTS)
    adapted = adapters.expected(base, folder, PROMPTS)
    assert plain != adapted
    if case == "quantized":
        # Codes of 8 bits change a token now and then.
        same = sum(
            ours[0] == theirs[0] for ours, theirs in zip(found, plain + adapted, strict=True)
        )
        assert same >= len(found) - 1
    else:
        assert found == plain + adapted


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_types(base: Path, folders: Any, requests: Any, dtype: str, most: float) -> None:
    """In half precision, log-probabilities are those of PEFT up to rounding, in a batch of two adapters and none."""
    names = [None, "everywhere", "patterns"]
    with adapters.engine(base, dtype=dtype) as llm:
        given = [requests.get(name) for name in names for _ in PROMPTS]
        found = adapters.logprobs(llm, PROMPTS * len(names), given)
    expected = [
        row
        for name in names
        for row in adapters.expected_logprobs(base, folders.get(name), PROMPTS)
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=most)
    # The adapters change more than the rounding does.
    plain = expected[: len(PROMPTS)] * len(names)
    changes = [
        max(abs(one - other) for one, other in zip(*rows, strict=True))
        for rows in zip(expected, plain, strict=True)
    ]
    assert min(changes[len(PROMPTS) :]) > 4 * most


def test_preempted_requests(base: Path, requests: Any, answers: Any) -> None:
    """Requests that lost their blocks are computed anew with their adapters, in chunks, too."""
    names = [*ADAPTERS, None] * 2
    small = {
        "num_gpu_blocks_override": 14,
        "block_size": 2,
        "max_num_batched_tokens": 6,
        "max_model_len": 16,
    }
    with adapters.engine(base, max_num_seqs=6, **small) as llm:
        found = adapters.greedy(llm, [PROMPTS[0]] * len(names), [requests.get(n) for n in names])
        assert llm.stats().counters.preemptions > 0
    assert found == [answers[name][0] for name in names]


@pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], ["embed_tokens", "down_proj"]])
def test_tied_embeddings(tmp_path: Path, targets: list[str]) -> None:
    """If the head has the weight of the embedding, an adapter of the embedding changes look-ups alone, as in PEFT."""
    base = adapters.saved_base(tmp_path / "base", tie_word_embeddings=True)
    folder = adapters.saved_adapter(base, tmp_path / "adapter", target_modules=targets, r=8)
    request = LoRARequest("tied", 1, str(folder))
    with adapters.engine(base) as llm:
        found = adapters.greedy(llm, PROMPTS * 2, [None] * len(PROMPTS) + [request] * len(PROMPTS))
    plain = adapters.expected(base, None, PROMPTS)
    adapted = adapters.expected(base, folder, PROMPTS)
    assert plain != adapted
    assert found == plain + adapted


def test_absorbed_weights(tmp_path: Path) -> None:
    """Queries absorb the weight of ``kv_b_proj``, so an adapter of this layer is refused."""
    base = adapters.saved_base(tmp_path / "base", "DeepseekV3", **LATENT)
    folder = adapters.saved_adapter(base, tmp_path / "adapter", target_modules=["kv_b_proj"])
    message = r"it changes 3 modules .* such as 'model.layers.0.self_attn.kv_b_proj'"
    with adapters.engine(base) as llm, pytest.raises(RequestError, match=message):
        adapters.greedy(llm, PROMPTS, LoRARequest("absorbed", 1, str(folder)))


class OwnProjection(QKVParallelLinear):
    """Reads its weight itself."""

    def forward(self, x: torch.Tensor) -> Any:
        output = functional.linear(x, self.weight, self.bias)
        return (output, None) if self.return_bias else output


class Fusing(QKVParallelLinear):
    """Calls the form of the weight method itself, if there is one."""

    def forward(self, x: torch.Tensor) -> Any:
        called = form_called(self)
        if called is None:
            return super().forward(x)
        form, (weight, *_) = called
        output = form(x, weight, self.bias)
        return (output, None) if self.return_bias else output


class OwnLogits(LogitsProcessor):
    """Reads the weight of the head itself."""

    def forward(self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: Any = None) -> Any:
        return functional.linear(hidden_states, lm_head.weight)[..., : self.org_vocab_size]


class Telling(QKVParallelLinear):
    """Calls the weight method."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


class Doubling(QKVParallelLinear):
    """Computes each row twice."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(torch.cat([x, x]))
        output = found[0] if self.return_bias else found
        half = output[: len(x)]
        return (half, None) if self.return_bias else half


def test_a_layer_with_other_rows(base: Path, folders: Any, tmp_path: Path, answers: Any) -> None:
    """An adapter of a layer that computes other rows than the model is refused when it is loaded."""
    other = adapters.saved_adapter(base, tmp_path, target_modules=["o_proj"])
    QKVParallelLinear.register_oot(Doubling)
    try:
        with adapters.engine(base) as llm:
            refused = LoRARequest("one", 1, str(folders["attention"]))
            with pytest.raises(RequestError, match="computes other rows than the model"):
                adapters.greedy(llm, PROMPTS, refused)
            assert adapters.greedy(llm, PROMPTS) == answers[None]
            found = adapters.greedy(llm, PROMPTS, LoRARequest("two", 2, str(other)))
    finally:
        QKVParallelLinear.unregister_oot(Doubling)
    assert found == adapters.expected(base, other, PROMPTS)


@pytest.mark.parametrize(
    ("replacement", "changed", "is_refused"),
    [
        (OwnProjection, "q_proj", True),
        (OwnProjection, "o_proj", False),
        (Telling, "q_proj", False),
        (Fusing, "q_proj", False),
        (OwnLogits, "lm_head", True),
    ],
)
def test_layers_of_plugins(
    base: Path, tmp_path: Path, replacement: Any, changed: str, is_refused: bool
) -> None:
    """An adapter is refused if a plugin's code computes with the weight of its layer itself."""
    folder = adapters.saved_adapter(base, tmp_path, target_modules=[changed])
    request = LoRARequest("one", 1, str(folder))
    [target] = replacement.__bases__
    target.register_oot(replacement)
    try:
        with adapters.engine(base) as llm:
            if is_refused:
                with pytest.raises(RequestError, match=rf"{changed}.* a plugin's class"):
                    adapters.greedy(llm, PROMPTS, request)
                return
            found = adapters.greedy(llm, PROMPTS, request)
    finally:
        target.unregister_oot(replacement)
    assert found == adapters.expected(base, folder, PROMPTS)


class WrongAdditions(ops.LoRA):
    """Adds NaN."""

    def forward_native(self, y: torch.Tensor, x: torch.Tensor, bounds: torch.Tensor) -> None:
        y[int(bounds[0]) :] += torch.nan


def test_a_replaced_op(base: Path, requests: Any, answers: Any) -> None:
    """The op of a plugin adds the adapters, ``explain`` shows it, and NaN is blamed on it."""
    ops.LoRA.register_oot(WrongAdditions)
    try:
        with adapters.engine(base) as llm:
            params = SamplingParams(temperature=0, max_tokens=2)
            given = [requests["attention"], None]
            failed, sound = llm.generate([PROMPTS[0]] * 2, params, lora_request=given)
            explained = llm.explain()
    finally:
        ops.LoRA.unregister_oot(WrongAdditions)
    assert "WrongAdditions" in str(failed.outputs[0].error)
    assert list(sound.outputs[0].token_ids) == answers[None][0][:2]
    paths = [row.path for row in explained.rows if row.op_class == "WrongAdditions"]
    assert "model.layers.0.self_attn.qkv_proj.adapters" in paths


class OwnRunner(ModelRunner):
    """Computes steps in another way, without a word about adapters."""

    def _compute(self, *args: Any, **settings: Any) -> Any:
        return super()._compute(*args, **settings)


class OwnAdaptingRunner(OwnRunner):
    """Says that it applies adapters."""

    takes_adapters = True


@pytest.mark.parametrize("runner", [OwnRunner, OwnAdaptingRunner])
def test_runners_of_plugins(base: Path, requests: Any, answers: Any, runner: Any) -> None:
    """A runner that computes steps in another way says if it takes adapters."""
    PluggableClass.register_oot(runner, name="model_runner")
    try:
        if runner is OwnRunner:
            with pytest.raises(ConfigError, match="OwnRunner computes steps without adapters"):
                adapters.engine(base)
            return
        with adapters.engine(base) as llm:
            found = adapters.greedy(llm, PROMPTS, requests["attention"])
    finally:
        PluggableClass.unregister_oot(runner)
    assert found == answers["attention"]


def changed_config(folder: Path, **changes: Any) -> None:
    """Change settings in the config of an adapter."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def changed_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of an adapter."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is no folder and no file"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "it is missing"),
    "a pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "adapter_model.bin is a pickle",
    ),
    "DoRA": (lambda f: changed_config(f, use_dora=True), "use_dora is True"),
    "whole modules": (
        lambda f: changed_config(f, modules_to_save=["lm_head"]),
        r"modules_to_save is \['lm_head'\]",
    ),
    "biases": (lambda f: changed_config(f, bias="all"), "bias is 'all'"),
    "another method": (lambda f: changed_config(f, peft_type="IA3"), "peft_type is 'IA3'"),
    "PiSSA": (
        lambda f: changed_config(f, init_lora_weights="pissa"),
        "init_lora_weights is 'pissa'",
    ),
    "a setting of the future": (lambda f: changed_config(f, twice=2), "twice is 2"),
    "another rank": (lambda f: changed_config(f, r=5), "the config's rank is 5"),
    "a large rank": (
        lambda f: shutil.copytree(f.with_name("large"), f, dirs_exist_ok=True),
        "has the rank 80, and lora.max_lora_rank is 64",
    ),
    "an unknown pattern": (
        lambda f: changed_config(f, rank_pattern={"(a+)+$": 4}),
        r"rank_pattern has the pattern '\(a\+\)\+\$': it is not read here",
    ),
    "an open group": (
        lambda f: changed_config(f, alpha_pattern={"(q_proj": 4}),
        r"alpha_pattern has the pattern '\(q_proj': its parentheses do not fit",
    ),
    "a long name": (
        lambda f: changed_tensors(
            f, lambda t: t.update({FIRST.replace("q_proj", "q" * 300): t.pop(FIRST)})
        ),
        "has over 300 characters",
    ),
    "an infinite scale": (
        lambda f: changed_config(f, lora_alpha=float("inf")),
        "lora_alpha is inf, expected a finite number above 0",
    ),
    "a scale that is too large": (
        lambda f: changed_config(f, lora_alpha=1e300),
        "not finite, or too large for torch.float32",
    ),
    "a value that is no number": (
        lambda f: changed_tensors(f, lambda t: t[FIRST][1, 2].fill_(torch.nan)),
        "has values for 'model.layers.0.self_attn.qkv_proj' that are not finite",
    ),
    "half a pair": (lambda f: changed_tensors(f, lambda t: t.pop(FIRST)), "lacks the matrix A"),
    "an unknown module": (
        lambda f: changed_tensors(
            f,
            lambda t: t.update(
                {
                    name.replace("q_proj", "qq_proj"): t.pop(name)
                    for name in list(t)
                    if "q_proj" in name
                }
            ),
        ),
        "it changes 3 modules .* such as 'model.layers.0.self_attn.qq_proj'",
    ),
    "a whole tensor": (
        lambda f: changed_tensors(
            f, lambda t: t.update({"base_model.model.lm_head.weight": t[FIRST].clone()})
        ),
        "the tensor 'base_model.model.lm_head.weight' belongs to no pair of matrices",
    ),
    "another model": (
        lambda f: changed_tensors(f, lambda t: t.update({FIRST: torch.zeros(4, 40)})),
        r"has shape \(4, 40\), expected \(4, 48\)",
    ),
}


@pytest.fixture(scope="module")
def large(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter with a large rank."""
    return adapters.saved_adapter(base, tmp_path_factory.mktemp("large"), r=80)


@pytest.mark.parametrize("fault", REFUSED)
def test_adapters_that_cannot_be_applied(
    llm: Any, folders: Any, answers: Any, large: Path, tmp_path: Path, fault: str
) -> None:
    """The error names the part of the adapter, and the engine goes on."""
    damage, message = REFUSED[fault]
    folder = tmp_path / "adapter"
    shutil.copytree(folders["attention"], folder)
    shutil.copytree(large, tmp_path / "large")
    damage(folder)
    request = LoRARequest("broken", 99, str(folder))
    with pytest.raises(RequestError, match=f"the adapter 'broken' cannot be used: .*{message}"):
        adapters.greedy(llm, PROMPTS, request)
    assert adapters.greedy(llm, PROMPTS) == answers[None]


def test_files_of_another_kind_are_not_read(folders: Any, tmp_path: Path) -> None:
    """A large file without matrices is refused by the names of its tensors."""
    shutil.copytree(folders["attention"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_model.safetensors"
    save_file({"model.lm_head.weight": torch.zeros(2**22)}, file)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="belongs to no pair of matrices"):
            open_adapter(str(tmp_path), 64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < file.stat().st_size / 4


def test_numbers_of_adapters(llm: Any, requests: Any) -> None:
    """A number that names another adapter is refused, as are values of wrong types."""
    adapters.greedy(llm, PROMPTS[:1], requests["attention"])
    other = LoRARequest("other", 1, requests["everywhere"].lora_path)
    with pytest.raises(RequestError, match="lora_int_id 1, which is that of 'attention'"):
        adapters.greedy(llm, PROMPTS, other)
    with pytest.raises(RequestError, match="lora_request is 'attention'"):
        adapters.greedy(llm, PROMPTS, "attention")
    with pytest.raises(RequestError, match="2 adapters"):
        adapters.greedy(llm, PROMPTS, [None, None])
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("lora_name", ("", 1, "x")),
        ("lora_name", ("x" * 201, 1, "x")),
        ("lora_name", ("\x1b[2J", 1, "x")),
        ("lora_int_id", ("x", 0, "x")),
        ("lora_int_id", ("x", True, "x")),
        ("lora_path", ("x", 1, None)),
    ]
    for field, values in wrong:
        with pytest.raises(RequestError, match=f"{field} is") as caught:
            LoRARequest(*values)
        assert caught.value.field == field


def test_settings(base: Path, requests: Any) -> None:
    """Without ``lora.enabled`` adapters are refused, and so are settings that forbid them."""
    plain = LLM(str(base), dtype="float32", num_gpu_blocks_override=64)
    message = r"lora.enabled is not set.*enable_lora=True"
    with plain, pytest.raises(RequestError, match=message):
        adapters.greedy(plain, PROMPTS, requests["attention"])
    with pytest.raises(ConfigError, match=r"lora.enabled and model.batch_invariant are set"):
        adapters.engine(base, **{"model.batch_invariant": True})


def test_changed_files(base: Path, folders: Any, tmp_path: Path) -> None:
    """An adapter that was forgotten is read again, and its old blocks serve nobody."""
    folder = tmp_path / "adapter"
    prompts = [PROMPTS[2] * 6]
    with adapters.engine(base, max_loras=1, block_size=8) as llm:
        other = LoRARequest("other", 2, str(folders["stable"]))
        for name in ("attention", "patterns"):
            shutil.copytree(folders[name], folder, dirs_exist_ok=True)
            expected = adapters.expected(base, folder, prompts)
            assert adapters.greedy(llm, prompts, LoRARequest("one", 1, str(folder))) == expected
            adapters.greedy(llm, prompts, other)


def asking(name: str, lora: LoRARequest) -> Request:
    """Return a greedy request of the first prompt with an adapter."""
    params = SamplingParams(temperature=0, max_tokens=adapters.LENGTH, ignore_eos=True)
    return Request(name, PROMPTS[0], params, lora=lora)


@pytest.mark.parametrize(
    ("others", "message"),
    [("patterns", "its files have changed while requests name it"), (None, "is no folder")],
)
def test_files_that_change_while_requests_wait(
    base: Path, folders: Any, answers: Any, tmp_path: Path, others: str | None, message: str
) -> None:
    """All requests that wait for the adapter end at once, and those beside them go on."""
    folder = tmp_path / "adapter"
    shutil.copytree(folders["attention"], folder)
    names = {1: "everywhere", 3: "stable"}
    loras = {
        number: LoRARequest(name, number, str(folders[name])) for number, name in names.items()
    }
    loras[2] = LoRARequest("changed", 2, str(folder))
    requests = [asking(f"{place}", loras[number]) for place, number in enumerate((1, 2, 2, 3))]
    with adapters.engine(base, max_loras=1) as llm:
        core = llm.engine.core
        core.add(requests)
        shutil.rmtree(folder)
        if others is not None:
            shutil.copytree(folders[others], folder)
        failed = []
        while core.has_work:
            news = [each for each in core.step() if each.error is not None]
            assert all(message in str(each.error) for each in news)
            failed.append([each.request_id for each in news])
        assert [each for each in failed if each] == [["1", "2"]]
        assert [requests[0].output, requests[3].output] == [
            answers[name][0] for name in names.values()
        ]
        if others is not None:
            assert adapters.greedy(llm, PROMPTS, loras[2]) == answers[others]


def test_a_request_from_another_engine(llm: Any, requests: Any) -> None:
    """A request that goes on in another engine finds the same files there, or ends."""
    moved = asking("moved", requests["attention"])
    moved.lora_digest = "another"
    with pytest.raises(RequestError, match="its files have changed"):
        llm.engine.core.add([moved])
    assert not llm.engine.core.has_work


@pytest.mark.parametrize("is_added_again", [False, True])
def test_removed_adapters(base: Path, requests: Any, is_added_again: bool) -> None:
    """A removed adapter goes with its last request, unless it was added again."""
    first, second = requests["attention"], requests["everywhere"]
    with adapters.engine(base) as llm:
        core = llm.engine.core
        core.add([asking("one", first)])
        core.step()
        core.remove_lora(1)
        if is_added_again:
            core.add_lora(first)
        while core.has_work:
            assert 1 in core.adapters
            core.step()
        assert (1 in core.adapters) is is_added_again
        core.add_lora(second)
        assert (1 in core.adapters) is is_added_again


def test_a_worker_that_is_lost_before_it_reads_an_adapter_again(base: Path, requests: Any) -> None:
    """The requests end with the reason, and ``step`` raises nothing."""
    settings = {"parallel.executor": "processes", "max_loras": 1}
    with adapters.engine(base, **settings) as llm:
        core = llm.engine.core
        core.add([asking(name, requests[name]) for name in ("attention", "everywhere")])
        assert requests["attention"].lora_int_id not in core.adapters
        process_of(core.executor).kill()  # type: ignore[arg-type]
        ended = {each.request_id: str(each.error) for each in core.step()}
    assert ended.keys() == {"attention", "everywhere"}
    assert all("with the status -9" in error for error in ended.values())


def test_samples_share_a_prompt(llm: Any, requests: Any, answers: Any) -> None:
    """Several answers to a prompt have its adapter."""
    params = SamplingParams(
        top_k=1, n=3, max_tokens=adapters.LENGTH, ignore_eos=True, prompt_logprobs=1
    )
    [output] = llm.generate([PROMPTS[0]], params, lora_request=requests["everywhere"])
    assert [list(each.token_ids) for each in output.outputs] == [answers["everywhere"][0]] * 3
