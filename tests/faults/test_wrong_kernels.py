"""A kernel of a plugin that makes a model fail is named, with its file and line, and the model is not blamed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from conftest import Site
from faults.test_models import copied
from opgraft import LLM, OpgraftConfig, SamplingParams, cli, set_config
from opgraft.binding import comparison
from opgraft.binding.blame import beside_native_definitions
from opgraft.binding.provenance import exits_as_errors
from opgraft.engine.runner.changed_weights import changed_weight
from opgraft.errors import CheckpointError, ModelError, PluginError
from opgraft.ops import GELU, Linear, LinearAct, RMSNorm
from opgraft.plugins.host import load_plugins
from opgraft.testing.diagnosis import (
    changes_by_layers,
    lost_gradients,
    unfinished_constructors,
    wrong_results,
    wrong_results_of_layers,
)
from safetensors.torch import load_file, save_file
from support.faults.model_rows import CONTENTS
from support.small_words import word_llama
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"load.progress": False, "cache.num_blocks": 300}
BLOCKS = ("--cache.num_blocks", "300")


def kernel(op: str, arguments: str, body: str) -> str:
    """A plugin that replaces an op by a class with one kernel, or another method."""
    return (
        f"import opgraft, torch\nfrom opgraft.ops import {op}\nplatforms = 'any'\n"
        f"class Acme({op}):\n    def {arguments}:\n        {body}\n"
        f"{op}.register_oot(Acme)\n"
    )


NORM = "forward_oot(self, x, residual=None)"
CONSTRUCTOR = "__init__(self, *args, **kwargs)"
NAN_NORM = kernel(
    "RMSNorm",
    NORM,
    "made = RMSNorm.forward_native(self, x, residual)\n"
    "        return tuple(t * torch.nan for t in made) if residual is not None else made * torch.nan",
)
NAN_LAYER_NORM = kernel("LayerNorm", "forward_oot(self, x)", "return x * torch.nan")
INFINITE_GATE = kernel(
    "SiluAndMul", "forward_oot(self, x)", "return x[..., : x.shape[-1] // 2] / 0"
)


def form(op: str, name: str, body: str) -> str:
    """A plugin that brings a function for a functional form, and nothing else."""
    return (
        f"import opgraft, torch\nfrom opgraft.ops import {op}\nplatforms = 'any'\n"
        f"native = opgraft.functional.{name}.native\n"
        f"def wrong(*args, **kwargs):\n    {body}\n"
        f"class Acme({op}):\n    functional_oot = {{'{name}': wrong}}\n"
        f"{op}.register_oot(Acme)\n"
    )


NAN = "return native(*args, **kwargs) * torch.nan"
PAGES = (
    "forward_oot(self, query, cache, block_table, query_start_loc, seq_lens, sinks=None)",
    "made = PagedAttention.forward_native(\n"
    "            self, query, cache, block_table, query_start_loc, seq_lens, sinks)\n"
    "        return made * torch.nan if CONDITION else made",
)
PAGES_OF = {
    "paged attention": "True",
    "paged attention of a prompt": "len(query) > 1",
    "paged attention of one token": "len(query) == len(seq_lens)",
    "paged attention of two sequences": "len(seq_lens) == 2",
}
RAISED = "made = super().{0}; return made * torch.nan"
DECODERS = {
    "the form of linear layers": form("Linear", "linear", NAN),
    "the form of paged attention": form("PagedAttention", "paged_attention", NAN),
    **{
        name: kernel("PagedAttention", PAGES[0], PAGES[1].replace("CONDITION", condition))
        for name, condition in PAGES_OF.items()
    },
    "the cache": kernel(
        "WriteKVCache",
        "forward_oot(self, key, value, cache, slots)",
        "WriteKVCache.forward_native(self, key * torch.nan, value, cache, slots)",
    ),
    "a layer": kernel(
        "RowParallelLinear", "forward(self, input_)", "return super().forward(input_) * torch.nan"
    ),
    "an attention layer": kernel(
        "Attention",
        "attend_batch(self, batch, pages, query, key, value)",
        "return super().attend_batch(batch, pages, query, key, value) * torch.nan",
    ),
    "a weight method": (
        "import opgraft, torch\nfrom opgraft.ops.linear.methods import UnquantizedLinearMethod as Method\n"
        "platforms = 'any'\nclass Acme(Method):\n"
        "    def apply(self, layer, x, bias=None, **others):\n"
        "        return super().apply(layer, x, bias, **others) * torch.nan\n"
        "Method.register_oot(Acme)\n"
    ),
}
RAISING_NORM = kernel("RMSNorm", NORM, "raise OSError('no device')")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder."""
    return word_llama(tmp_path_factory.mktemp("llama"))


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of the command line in this process, and what it printed on stderr."""
    opgraft.reset()
    capfd.readouterr()
    code = cli._run(arguments)
    return code, capfd.readouterr().err


def place(site: Site) -> str:
    return f"at {site.folder / 'acme.py'}:"


@pytest.mark.usefixtures("one_round")
@pytest.mark.parametrize("source", [NAN_NORM, INFINITE_GATE], ids=["a norm", "a gate"])
@pytest.mark.parametrize("options", [(), ("--compare",)], ids=["run", "compare"])
def test_numbers_of_a_decoder(
    capfd: pytest.CaptureFixture[str],
    site: Site,
    llama: Path,
    source: str,
    options: tuple[str, ...],
) -> None:
    """The first kernel whose result differs from its native definition is told, not that weights are damaged."""
    site.plugin("acme", source)
    code, said = run(capfd, "run", str(llama), "the cat", *options, *BLOCKS)
    assert code == 2, said
    assert "Acme.forward_oot of acme 1.0" in said, said
    assert place(site) in said
    assert "to go without it: " in said
    assert "weights are damaged" not in said


@pytest.mark.parametrize("case", DECODERS)
def test_whatever_a_decoder_calls(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, case: str
) -> None:
    """A functional form, attention over pages, a layer or a weight method is told as an op is.

    The advice works: with what it says the same command ends well.
    """
    site.plugin("acme", DECODERS[case])
    code, said = run(capfd, "run", str(llama), "the cat sleeps", "a dog runs on", *BLOCKS)
    assert code == 2, said
    assert "Acme" in said, said
    assert "of acme 1.0" in said
    assert place(site) in said
    assert "weights are damaged" not in said
    for options, variables in advised(said):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            code, again = run(capfd, "run", str(llama), "the cat", *options, *BLOCKS)
        assert code == 0, (options, variables, again)


def advised(said: str) -> list[tuple[list[str], dict[str, str]]]:
    """The options and variables by which a message says that one goes without a kernel."""
    _, _, advice = said.partition("to go without it: ")
    options = [found.split() for found in re.findall(r"--providers \w+=native", advice)]
    settings = dict(re.findall(r"(OPGRAFT_\w+)=([\w=]+)", advice))
    assert len(options) == 1, advice
    assert settings.keys() == {"OPGRAFT_PROVIDERS", "OPGRAFT_PLUGINS_DISABLE"}, advice
    return [(options[0], {}), *(([], {name: value}) for name, value in settings.items())]


def test_advice_where_a_scope_asks_already(site: Site, llama: Path) -> None:
    """The advice names the scope that outranks the environment, and what to add there."""
    site.plugin("acme", NAN_NORM)
    asked = OpgraftConfig(providers={"silu_and_mul": "native"})
    cases = [
        ("the opgraft_config of LLM", OpgraftConfig(), asked),
        ("set_config", asked, None),
    ]
    for scope, around, given in cases:
        with set_config(around), LLM(str(llama), opgraft_config=given) as llm:
            (output,) = llm.generate(["the cat"])
        assert f"providers is set by {scope}, which outranks" in str(output)
        assert "add rms_norm=native there" in str(output)


@pytest.mark.usefixtures("one_round")
@pytest.mark.parametrize("options", [(), ("--compare",)], ids=["run", "compare"])
def test_numbers_of_an_encoder(
    capfd: pytest.CaptureFixture[str], site: Site, encoder: Path, options: tuple[str, ...]
) -> None:
    """The same of vectors; the exit code is that of a plugin's failure."""
    site.plugin("acme", NAN_LAYER_NORM)
    code, said = run(capfd, "run", str(encoder), "the cat", "a dog", *options)
    assert code == 4, said
    assert "Acme.forward_oot of acme 1.0" in said, said
    assert place(site) in said
    assert "weights are damaged" not in said


ROWS = "x * (torch.nan if x.numel() // x.shape[-1] {} else 1)"


def nan_if(rows: str) -> str:
    """A kernel of LayerNorm that returns NaN for some numbers of rows only."""
    body = f"x = LayerNorm.forward_native(self, x)\n        return {ROWS.format(rows)}"
    return kernel("LayerNorm", "forward_oot(self, x)", body)


def damaged(encoder: Path, tmp_path: Path, token: int, **settings: Any) -> LLM:
    """An encoder whose weights for a token are NaN."""
    name = "embeddings.word_embeddings.weight"
    folder = with_nan(copied(encoder, tmp_path), name, token)
    return LLM(str(folder), **{"load.progress": False, **settings})


def test_texts_of_an_encoder_without_numbers(site: Site, encoder: Path, tmp_path: Path) -> None:
    """Each text is named by its number, beside what is wrong with this text."""
    site.plugin("acme", nan_if("== 3"))
    llm = damaged(encoder, tmp_path, 7, **{"scheduler.max_num_seqs": 1})
    texts = [[4, 5], [4, 5, 6], [4, 7, 5, 6], [6, 4], [7, 5], [6, 5, 4]]
    with pytest.raises(PluginError) as error:
        llm.embed(texts)
    weights, kernels = str(error.value).split(" And for ")
    assert "infinity) for text 3 of 6, text 5 of 6: its weights are damaged" in weights
    assert kernels.startswith("text 2 of 6, text 6 of 6: Acme.forward_oot of acme 1.0")
    assert len(llm.embed([texts[0], texts[3]])) == 2
    with pytest.raises(CheckpointError, match="for text 2 of 2: its weights are damaged"):
        llm.embed([texts[0], texts[4]])


def test_a_kernel_that_is_wrong_for_several_texts_at_a_time(site: Site, encoder: Path) -> None:
    """The kernel is found although each text alone has numbers."""
    site.plugin("acme", nan_if("> 4"))
    llm = LLM(str(encoder), **{"load.progress": False})
    with pytest.raises(
        PluginError, match=r"for text 1 of 2, text 2 of 2: Acme\.forward_oot of acme"
    ):
        llm.embed([[4, 5, 6], [6, 5, 4]])
    assert len(llm.embed([[4, 5, 6]])) == 1


def test_numbers_of_a_fused_layer(site: Site) -> None:
    """A kernel that is wrong only if a layer has it compute an activation too is told."""
    fused = (
        "words = [x for x in (*args, *kwargs.values()) if isinstance(x, str) and x != 'none']\n"
        "    return native(*args, **kwargs) * (torch.nan if words else 1)"
    )
    site.plugin("acme", form("Linear", "linear", fused))
    layer = LinearAct(Linear(8, 8), GELU())
    classes = [type(each) for each in layer.modules()]
    with torch.no_grad(), beside_native_definitions(layer) as found:
        layer(torch.randn(2, 8))
    (culprit,) = found.culprits.values()
    assert "Acme.forward_oot of acme 1.0" in culprit
    assert [type(each) for each in layer.modules()] == classes


def test_numbers_of_a_compiled_decoder(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """The kernel of an op that is left to a compiler is told if the decoder runs it beside the compiler."""
    site.plugin("acme", NAN_NORM)
    options = ("--compilation_config.mode", "FULL", "--compilation_config.backend", "eager")
    code, said = run(capfd, "run", str(llama), "the cat", *options, *BLOCKS)
    assert code == 2, said
    assert "Acme.forward_oot of acme 1.0" in said, said


def test_weights_that_are_damaged(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, tmp_path: Path
) -> None:
    """Beside a kernel in order the weights are blamed."""
    folder = copied(llama, tmp_path)
    CONTENTS["weights that are no numbers"][0](folder)
    site.plugin("acme", kernel("RMSNorm", NORM, "return RMSNorm.forward_native(self, x, residual)"))
    _, said = run(capfd, "run", str(folder), "the cat", *BLOCKS)
    assert "weights are damaged" in said
    assert "acme" not in said


IMPRECISE_NORM = kernel(
    "RMSNorm",
    NORM,
    "made = RMSNorm.forward_native(self, x, residual)\n"
    "        return (made[0] * 1.05, made[1]) if residual is not None else made * 1.05",
)
PLAIN_ATTENTION = kernel(
    "Attention",
    "attend_batch(self, batch, pages, query, key, value)",
    "return super().attend_batch(batch, pages, query, key, value)",
)
DAMAGES = {
    "the last norm": (IMPRECISE_NORM, "model.norm.weight", slice(None)),
    "a token": (IMPRECISE_NORM, "model.embed_tokens.weight", 5),
    "a token before others": (PLAIN_ATTENTION, "model.embed_tokens.weight", 5),
}


NAN_EPSILON = kernel(
    "RMSNorm",
    "__init__(self, *args, **kwargs)",
    "super().__init__(*args, **kwargs)\n"
    "        self.variance_epsilon = float('nan')\n"
    f"    def {NORM}:\n"
    "        return RMSNorm.forward_native(self, x, residual)",
)


def test_a_constant_that_is_no_number(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """An op is to blame for a constant that it has set to NaN, which the native definition reads, too."""
    site.plugin("acme", NAN_EPSILON)
    _, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    assert f"eps of Acme of acme 1.0 {place(site)}" in said
    assert "is NaN; to go without it: " in said
    assert "weights are damaged" not in said


def with_nan(folder: Path, name: str, row: int | slice) -> Path:
    """Write NaN into rows of a tensor of a checkpoint."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[name][row] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", DAMAGES)
def test_weights_that_are_damaged_in_one_place(
    site: Site, llama: Path, tmp_path: Path, case: str
) -> None:
    """A kernel that is imprecise, or a layer that repeats what is native, is not to blame for NaN in weights."""
    source, name, row = DAMAGES[case]
    folder = with_nan(copied(llama, tmp_path), name, row)
    site.plugin("acme", source)
    with LLM(str(folder), **SMALL) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    assert "weights are damaged" in str(output)
    assert "acme" not in str(output)


SPOILS = kernel(
    "RMSNorm",
    NORM,
    "self.weight.data[3] = torch.nan\n        return RMSNorm.forward_native(self, x, residual)",
)
SPOILS_AFTER_LOADING = kernel(
    "RowParallelLinear", "process_weights_after_loading(self)", "self.weight.data[0] = torch.inf"
)
CHANGED = "holds NaN or infinity, and the files of"


@pytest.mark.parametrize("source", [SPOILS, SPOILS_AFTER_LOADING], ids=["a kernel", "a hook"])
def test_a_weight_that_a_plugin_changes(site: Site, llama: Path, source: str) -> None:
    """The weight and the class of its layer are named, as the files are in order."""
    site.plugin("acme", source)
    with LLM(str(llama), **SMALL) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    told = str(output)
    assert re.search(rf"the weight model\.layers\.0\.\S+\.weight {CHANGED} .* hold neither", told)
    assert f"Acme of acme 1.0 {place(site)}" in told
    assert "weights are damaged" not in told


def test_a_weight_that_the_program_changes(site: Site, llama: Path, encoder: Path) -> None:
    """Active plugins are named; without one, the program itself is to blame."""
    vectors = LLM(str(encoder), **{"load.progress": False})
    vectors.encoder.executor.worker.runner.model.embeddings.LayerNorm.bias.data[1] = torch.nan
    with pytest.raises(ModelError, match=rf"{CHANGED} .* No plugin is active, so the program"):
        vectors.embed([[4, 5]])
    site.plugin("acme", kernel("GELU", "forward_oot(self, x)", "return x"))
    opgraft.reset()
    vectors = LLM(str(encoder), **{"load.progress": False})
    vectors.encoder.executor.worker.runner.model.embeddings.LayerNorm.bias.data[1] = torch.nan
    with pytest.raises(ModelError, match=rf"{CHANGED} .* Active plugins: acme of acme 1\.0\."):
        vectors.embed([[4, 5]])
    with LLM(str(llama), **SMALL) as llm:
        llm.engine.core.executor.worker.runner.model.model.norm.weight.data[0] = torch.nan
        (output,) = llm.generate([[4, 5, 6]])
    assert f"model.norm.weight {CHANGED}" in str(output)
    assert "Active plugins: acme of acme 1.0. OPGRAFT_PLUGINS= goes without them" in str(output)


def test_a_weight_that_is_too_large_for_the_dtype(llama: Path, tmp_path: Path) -> None:
    """Infinity that the conversion of a dtype makes is no change in memory."""
    folder = copied(llama, tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = 7e4
    save_file(weights, file, metadata={"format": "pt"})
    with LLM(str(folder), **SMALL, **{"model.dtype": "float16"}) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    assert "weights are damaged" in str(output)
    assert CHANGED not in str(output)


def test_the_weights_that_are_compared_with_files(
    caplog: pytest.LogCaptureFixture, llama: Path, tmp_path: Path
) -> None:
    """Only the first wrong weight is read, after a line of the log, and only if a file has it."""
    folder = with_nan(copied(llama, tmp_path), "model.layers.0.input_layernorm.weight", 0)
    with LLM(str(llama), **SMALL) as llm:
        model = llm.engine.core.executor.worker.runner.model
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(torch.nan)))
    assert changed_weight(model, str(folder)) == ""
    assert "compared with the files" not in caplog.text
    model.model.norm.weight.data[0] = torch.inf
    assert f"model.norm.weight {CHANGED}" in changed_weight(model, str(folder))
    assert f"the weight model.norm.weight is compared with the files of {folder}" in caplog.text
    model.model.layers[0].input_layernorm.weight.data[1] = torch.nan
    assert changed_weight(model, str(folder)) == ""


def test_a_kernel_that_makes_huge_numbers(site: Site, llama: Path) -> None:
    """A kernel whose own numbers are finite is to blame if the model goes well without the kernel.

    Neither a kernel that is imprecise nor a layer that repeats what is native is to blame.
    """
    huge = kernel(
        "RotaryEmbedding",
        "forward_oot(self, positions, query, key=None)",
        "query, key = RotaryEmbedding.forward_native(self, positions, query, key)\n"
        "        return query * 1e38, key * 1e38",
    )
    imprecise = IMPRECISE_NORM.replace("Acme", "Norm")
    attention = PLAIN_ATTENTION.replace("Acme", "Plain")
    site.plugin("acme", imprecise + attention + huge)
    with LLM(str(llama), **SMALL) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    assert "Acme.forward_oot of acme 1.0" in str(output)


OF_SIX = kernel(
    "RMSNorm",
    NORM,
    "made = RMSNorm.forward_native(self, x, residual)\n"
    "        scale = torch.nan if len(x) == 6 else 1\n"
    "        return (made[0] * scale, made[1]) if residual is not None else made * scale",
)


@pytest.mark.parametrize("turn", [1, -1], ids=["weights first", "kernel first"])
def test_each_request_has_its_own_reason(
    site: Site, llama: Path, tmp_path: Path, turn: int
) -> None:
    """What was found for a request says nothing about the next one."""
    folder = with_nan(copied(llama, tmp_path), "model.embed_tokens.weight", 5)
    site.plugin("acme", OF_SIX)
    damaged_token = [5, 4, 3]
    six = [4, 3, 6, 7, 8, 9]
    rows = [(damaged_token, "weights are damaged"), (six, "Acme.forward_oot of acme 1.0")]
    with LLM(str(folder), **SMALL) as llm:
        for tokens, reason in rows[::turn]:
            (output,) = llm.generate([tokens])
            assert reason in str(output)


def test_many_texts_without_numbers(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of the texts of a batch are computed again, and the error counts the texts instead of naming all."""
    llm = damaged(encoder, tmp_path, 7)
    runner = llm.encoder.executor.worker.runner
    search = runner.wrong_kernel
    searched = []

    def counted(sequences: Any) -> str:
        searched.append(sequences)
        return search(sequences)

    monkeypatch.setattr(runner, "wrong_kernel", counted)
    with pytest.raises(CheckpointError) as error:
        llm.embed([[4, 7, 5, 6]] * 400)
    batches = llm.encoder.counters.steps
    assert len(searched) <= 2 * batches
    assert "for text 1 of 400, text 2 of 400 and 398 more: its weights" in str(error.value)


NOT_COMPARED = {
    "random": (NAN_NORM.replace("made = ", "torch.rand(1); made = "), None),
    "a buffer of its own": (
        NAN_NORM.replace("made = ", "self.weight.mul_(1); made = "),
        None,
    ),
    "large": (NAN_NORM, 1),
}


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_calls_that_cannot_be_compared(
    site: Site, llama: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A kernel whose calls cannot be compared is to blame if it makes NaN of finite numbers."""
    source, most_bytes = NOT_COMPARED[case]
    if most_bytes is not None:
        monkeypatch.setattr(comparison, "_MOST_BYTES", most_bytes)
    site.plugin("acme", source)
    with LLM(str(llama), **SMALL) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    assert "Acme.forward_oot of acme 1.0" in str(output)
    assert "weights are damaged" not in str(output)


def class_of(module: str, name: str, method: str) -> str:
    """A plugin whose class replaces a whole part of the engine, and multiplies by NaN in a method."""
    return (
        f"import opgraft, torch\nfrom {module} import {name}\nplatforms = 'any'\n"
        f"class Acme({name}):\n    def {method}\n{name}.register_oot(Acme)\n"
    )


CLASSES = {
    "a sampler": class_of(
        "opgraft.engine.sampling",
        "Sampler",
        "__call__(self, logits, batch): return super().__call__(logits * torch.nan, batch)",
    ),
    "a model": class_of(
        "opgraft.models.families",
        "LlamaForCausalLM",
        "compute_logits(self, hidden): return super().compute_logits(hidden) * torch.nan",
    ),
    "a runner": class_of(
        "opgraft.engine.runner.model_runner",
        "ModelRunner",
        "_logits(self, *given): return super()._logits(*given) * torch.nan",
    ),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_replaced_class_is_told(site: Site, llama: Path, case: str) -> None:
    """A class that replaces a whole part is named beside the weights, as its numbers are not compared."""
    site.plugin("acme", CLASSES[case])
    with LLM(str(llama), **SMALL) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    assert "a replaced class is in use: Acme of acme 1.0 at" in str(output)
    assert "to go without it: " in str(output)


def test_a_replaced_class_of_an_encoder_is_told(site: Site, encoder: Path) -> None:
    """The same of vectors."""
    source = class_of(
        "opgraft.engine.runner.model_runner",
        "ModelRunner",
        "encode(self, texts): return [each * torch.nan for each in super().encode(texts)]",
    )
    site.plugin("acme", source)
    llm = LLM(str(encoder), **{"load.progress": False})
    with pytest.raises(CheckpointError, match=r"a replaced class is in use: Acme of acme 1\.0"):
        llm.embed([[4, 5]])


def test_a_kernel_that_raises(capfd: pytest.CaptureFixture[str], site: Site, llama: Path) -> None:
    """Exit code 4 and one sentence with plugin, file and line; ``--traceback`` shows the calls, wherever it stands."""
    site.plugin("acme", RAISING_NORM)
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    lines = [line for line in said.splitlines() if "acme" in line]
    assert (code, len(lines)) == (4, 1), said
    assert lines[0].startswith("error: OSError: no device, raised in op rms_norm, by Acme.")
    assert place(site) in lines[0]
    assert "Traceback" not in said
    for arguments in (("--traceback", "run"), ("run", "--traceback")):
        code, said = run(capfd, *arguments, str(llama), "the cat", *BLOCKS)
        assert code == 4
        assert "Traceback (most recent call last)" in said
        assert "error: OSError: no device, raised in op rms_norm" in said


AT_LINE_7 = {
    "a library that is called": (
        "import json\n        return json.loads('{')",
        "error: JSONDecodeError: ",
    ),
    "no Exception": (
        "\n        raise GeneratorExit",
        "error: GeneratorExit, raised in op rms_norm",
    ),
    "an error of opgraft": (
        "from opgraft.errors import OpgraftError\n        raise OpgraftError('mine')",
        "error: mine, raised in op rms_norm",
    ),
}


@pytest.mark.parametrize("name", AT_LINE_7)
def test_a_kernel_that_raises_in_another_way(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, name: str
) -> None:
    """The plugin's own line is named, with exit code 4, whatever it raises."""
    body, words = AT_LINE_7[name]
    site.plugin("acme", kernel("RMSNorm", NORM, body))
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 4
    assert line.startswith(words)
    assert f"by Acme.forward_oot of acme 1.0 {place(site)}7" in line
    assert "Traceback" not in said


def test_a_weight_method_that_raises(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """A hook after the load is the plugin's failure, not the weight's."""
    source = class_of(
        "opgraft.ops.linear.methods",
        "UnquantizedLinearMethod",
        "process_weights_after_loading(self, layer): raise OSError('no post')",
    )
    site.plugin("acme", source)
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    assert code == 4
    assert "OSError: no post, raised by Acme.process_weights_after_loading of acme 1.0 at" in said


def test_a_weight_method_that_raises_at_a_call(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """The class of the plugin is named with the setting, and not the layer that calls the method."""
    source = class_of(
        "opgraft.ops.linear.methods",
        "UnquantizedLinearMethod",
        "apply(self, layer, x, bias=None, **others): raise OSError('no device')",
    )
    site.plugin("acme", source)
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    assert code == 4
    assert f"OSError: no device, raised by Acme.apply of acme 1.0 {place(site)}5" in said
    assert "to go without it: OPGRAFT_PLUGINS_DISABLE=acme" in said


def test_a_layer_with_other_weights(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """The plugin's class with other names is named beside the missing weights, and not the checkpoint."""
    body = (
        "torch.nn.Module.__init__(self)\n"
        "        self.gamma = torch.nn.Parameter(torch.ones(hidden_size))"
    )
    site.plugin("acme", kernel("RMSNorm", "__init__(self, hidden_size, *given, **others)", body))
    _, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    assert "'model.norm.gamma' is missing" in said
    assert f"a replaced class is in use: Acme of acme 1.0 {place(site)}" in said
    assert "to go without it: OPGRAFT_PROVIDERS=rms_norm=native" in said
    assert "give the configuration and the weights of one model" not in said


def test_a_layer_whose_weight_the_checkpoint_lacks(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, tmp_path: Path
) -> None:
    """A plugin's class with the names of the native one is not to blame."""
    folder = copied(llama, tmp_path / "without")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    body = "super().__init__(*args, **kwargs)"
    site.plugin("acme", kernel("RMSNorm", CONSTRUCTOR, body))
    _, said = run(capfd, "run", str(folder), "the cat", *BLOCKS)
    assert "'model.norm.weight' is missing" in said
    assert "give the configuration and the weights of one model" in said
    assert "acme" not in said


NORMAL = "made = RMSNorm.forward_native(self, x, residual)\n        "
FIRST = "first, *rest = made if residual is not None else [made]\n        "
RETURNED = "return (CHANGED, *rest) if residual is not None else CHANGED"
MISSHAPEN = {
    "another dtype": (RETURNED.replace("CHANGED", "first.half()"), "the result is float16 ["),
    "another shape": (RETURNED.replace("CHANGED", "first[None]"), "the result is float32 [1, "),
    "nothing": ("return None", "the result is None, expected float32 ["),
    "a list": ("return [first]", "the result is a list, expected a Tensor"),
    "too many": ("return first, first, first", "the result has 3 parts, expected 1"),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_a_result_that_the_next_op_refuses(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, name: str
) -> None:
    """The kernel is named beside the error of the op that was called with its result."""
    body, words = MISSHAPEN[name]
    site.plugin("acme", kernel("RMSNorm", NORM, NORMAL + FIRST + body))
    code, said = run(capfd, "run", str(llama), "the cat", "--dtype", "float32", *BLOCKS)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 4
    assert "Acme.forward_oot of acme 1.0" in line
    assert place(site) in line
    assert words in line
    assert "OPGRAFT_PLUGINS_DISABLE=acme" in line
    assert "Traceback" not in said


def test_a_form_that_the_next_op_refuses(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """The same of a functional form."""
    site.plugin("acme", form("Linear", "linear", "return native(*args, **kwargs)[..., :3]"))
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    assert code == 4, said
    assert f"of acme 1.0 {place(site)}" in said


def test_a_result_that_an_encoder_refuses(site: Site, encoder: Path) -> None:
    """The same of an encoder."""
    site.plugin("acme", kernel("LayerNorm", "forward_oot(self, x)", "return x.double()"))
    with (
        pytest.raises(
            PluginError, match=r"Acme\.forward_oot of acme 1\.0 at .*acme\.py:5"
        ) as error,
        LLM(str(encoder), **{"load.progress": False}) as llm,
    ):
        llm.embed([[4, 5]])
    assert "the result is float64 [" in str(error.value)


LAYERS = {
    "an embedding": kernel(
        "VocabParallelEmbedding", "forward(self, *given)", "return super().forward(*given).double()"
    ),
    "an attention layer": kernel(
        "Attention", "forward(self, query, *given)", "return super().forward(query, *given)[:1]"
    ),
    "a weight method": class_of(
        "opgraft.ops.linear.methods",
        "UnquantizedLinearMethod",
        "apply(self, *given, **others): return super().apply(*given, **others)[..., :3]",
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_result_of_a_layer_that_the_next_op_refuses(site: Site, llama: Path, case: str) -> None:
    """A layer without a native definition is named beside the error, which stays what it is."""
    site.plugin("acme", LAYERS[case])
    with LLM(str(llama), **SMALL) as llm:
        (output,) = llm.generate([[4, 5, 6]])
        # Nothing proves that the layer is wrong: the command ends with no code of plugins.
        assert llm.engine.core.step_failure is None  # type: ignore[union-attr]
    assert "PluginError" not in str(output)
    assert ". Besides, a replaced class is in use: Acme of acme 1.0 at" in str(output)
    assert place(site).removeprefix("at ") in str(output)


CORRECT_LAYER = kernel(
    "Attention", "forward(self, *given)", "return Attention.forward(self, *given)"
)


@pytest.mark.parametrize("kind", [ValueError, ModelError])
@pytest.mark.parametrize("source", [IMPRECISE_NORM, CORRECT_LAYER], ids=["a norm", "a layer"])
def test_an_error_that_no_kernel_has_caused(
    site: Site, llama: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: type[Exception]
) -> None:
    """A kernel in order, and one that is imprecise, are not blamed for an error of the engine."""
    site.plugin("acme", source)
    with LLM(str(llama), **SMALL) as llm:
        runner = llm.engine.core.executor.worker.runner  # type: ignore[union-attr]

        def fail(*given: Any) -> None:
            raise kind("no room")

        monkeypatch.setattr(runner, "_sample", fail)
        (output,) = llm.generate([[4, 5, 6]])
        assert llm.engine.core.step_failure is None  # type: ignore[union-attr]
    assert f"{kind.__name__}: no room" in str(output)
    assert "acme" not in str(output)


EXITS = {"SystemExit: 3": "raise SystemExit(3)", "KeyboardInterrupt": "raise KeyboardInterrupt"}


@pytest.mark.parametrize("told", EXITS)
def test_a_kernel_that_ends_the_process(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, told: str
) -> None:
    """It is an error of the plugin, with exit code 4, and the doctor still checks the kernels of others."""
    site.plugin("acme", kernel("RMSNorm", NORM, EXITS[told]))
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 4
    assert line.startswith(f"error: {told}, raised in op rms_norm, by Acme.forward_oot of acme 1.0")
    assert place(site) in line
    site.plugin("cedar", kernel("NewGELU", "forward_oot(self, x)", "return x.float()"))
    opgraft.reset()
    load_plugins()
    findings = [str(each) for each in (*wrong_results(), *lost_gradients())]
    assert [each for each in findings if f"raised {told} for bfloat16 inputs of rms_norm" in each]
    assert [each for each in findings if "returns float32 [7, 9], expected bfloat16" in each]


WRITES = {
    "in place": "x.mul_(0.5); return super().forward_native(x * 2)",
    "afterwards": "out = super().forward_native(x); x[..., 0] += 1; return out",
    "one number": "out = super().forward_native(x); x.view(-1)[3] = 7; return out",
    "all numbers": "out = super().forward_native(x); x.zero_(); return out",
}


@pytest.mark.parametrize("body", WRITES)
def test_a_kernel_that_writes_into_its_input(site: Site, body: str) -> None:
    """The doctor compares every argument before and after a call, and names the written one."""
    site.plugin("acme", kernel("NewGELU", "forward_oot(self, x)", WRITES[body]))
    load_plugins()
    findings = [str(each) for each in wrong_results()]
    words = (
        "writes into its argument 'x', which the op leaves alone, for float32 inputs of gelu_new"
    )
    assert [each for each in findings if words in each]


PATCH = "torch.rsqrt = lambda x: x * 0"
GATE = kernel("SiluAndMul", "forward_oot(self, x)", "return super().forward_native(x)")
CHECK = "@opgraft.needs(lambda: setattr(torch, 'rsqrt', abs))"
THREAD = """
import threading
go = threading.Event()
def patch():
    go.wait(60)
    torch.rsqrt = lambda x: x * 0
thread = threading.Thread(target=patch, daemon=True)
thread.start()
"""
LATE_PATCHES = {
    "a check": GATE.replace("    def", f"    {CHECK}\n    def"),
    "a first call": GATE.replace("return", f"{PATCH}; return"),
    "a weight method": class_of(
        "opgraft.ops.linear.methods",
        "UnquantizedLinearMethod",
        f"create_weights(self, *given, **others): {PATCH}; super().create_weights(*given, **others)",
    ),
    "a thread": GATE.replace("return", "go.set(); thread.join(); return") + THREAD,
}


@pytest.mark.parametrize("case", LATE_PATCHES)
def test_a_patch_after_plugins_were_loaded(caplog, site: Site, llama: Path, case: str) -> None:
    """A function of torch that a plugin replaces by a check, a call, a class or a thread is put back and told."""
    site.plugin("acme", LATE_PATCHES[case])
    former = torch.rsqrt
    opgraft.reset()
    try:
        LLM(str(llama), **SMALL).generate(["the cat"], SamplingParams(max_tokens=1))
        assert torch.rsqrt is former
    finally:
        torch.rsqrt = former
    (told,) = [each for each in caplog.messages if "changed torch.rsqrt" in each]
    assert ": it was set back (" in told
    assert told.count("acme 1.0") == 1
    assert f"{site.folder / 'acme.py'}:" in told


SEEDS = {
    "manual_seed": "torch.manual_seed(7)",
    "drawn afterwards": "torch.manual_seed(7); torch.rand(3)",
    "a state": "torch.set_rng_state(torch.Generator().manual_seed(3).get_state())",
    "the default generator": "torch.default_generator.manual_seed(0)",
}
SEEDED = "sets the state of torch's random numbers"


@pytest.mark.parametrize("body", SEEDS)
def test_a_kernel_that_seeds_torch(site: Site, body: str) -> None:
    """The doctor names a kernel that sets the random numbers of the process, in ops and in layers."""
    site.plugin("acme", kernel("NewGELU", "forward_oot(self, x)", f"{SEEDS[body]}; return x"))
    source = f"{SEEDS[body]}; return super().forward(x)"
    site.plugin("cedar", kernel("GatedMLP", "forward(self, x)", source))
    load_plugins()
    (op,) = [each for each in map(str, wrong_results()) if SEEDED in each]
    assert op.startswith("Acme.forward_oot sets")
    (layer,) = map(str, changes_by_layers())
    assert layer.startswith("Acme.forward sets")
    assert "cedar.py:5" in layer


DRAWS = {
    "draws": "torch.rand(3)",
    "draws of its own": "torch.rand(3, generator=torch.Generator().manual_seed(7))",
    "forks": "\n        with torch.random.fork_rng(): torch.manual_seed(7)\n        x = x",
}


@pytest.mark.parametrize("body", DRAWS)
def test_a_kernel_that_draws(site: Site, body: str) -> None:
    """A kernel that draws random numbers, or seeds a copy of their state, is left alone."""
    site.plugin("acme", kernel("NewGELU", "forward_oot(self, x)", f"{DRAWS[body]}; return x"))
    source = f"{DRAWS[body]}; return super().forward(x)"
    site.plugin("cedar", kernel("GatedMLP", "forward(self, x)", source))
    load_plugins()
    assert not [each for each in map(str, wrong_results()) if SEEDED in each]
    assert not list(changes_by_layers())


PATCHED_LAYERS = {
    "RowParallelLinear": "forward(self, input_)",
    "QKVParallelLinear": "forward(self, input_)",
    "MergedColumnParallelLinear": "forward(self, input_)",
    "VocabParallelEmbedding": "forward(self, input_)",
    "LogitsProcessor": "forward(self, lm_head, hidden_states, embedding_bias=None)",
    "GatedMLP": "forward(self, x)",
    "MLP": "forward(self, x)",
    "LinearAct": "forward(self, x)",
    "LinearAddNorm": "forward(self, x, residual)",
    "Experts": "forward(self, hidden_states, top_k_index, top_k_weights)",
    "TransposedLinear": "forward(self, input)",
    "UnscaledRMSNorm": "forward(self, x)",
}


def layers(before: str) -> str:
    """A plugin with a class ``Acme<layer>`` for each layer, which does something before it calls its base."""
    sources = []
    for layer, arguments in PATCHED_LAYERS.items():
        names = ", ".join(each.partition("=")[0] for each in arguments[:-1].split(", ")[1:])
        source = kernel(layer, arguments, f"{before}return super().forward({names})")
        sources.append(source.replace("Acme", f"Acme{layer}"))
    return "".join(sources)


def test_a_layer_that_patches_torch_at_a_call(site: Site) -> None:
    """The doctor calls layers without a functional form, and undoes and names each patch."""
    site.plugin("acme", layers("torch.nn.functional.silu = torch.relu; "))
    load_plugins()
    silu = torch.nn.functional.silu
    findings = [str(each) for each in changes_by_layers()]
    assert torch.nn.functional.silu is silu
    words = "changed torch.nn.functional.silu when it was called"
    for layer in PATCHED_LAYERS:
        told = [each for each in findings if each.startswith(f"Acme{layer}.forward {words}")]
        assert len(told) == 1, (layer, findings)
    assert len(findings) == len(PATCHED_LAYERS)


OTHER_LAYERS = {
    "RowParallelLinear": (
        "(super().forward(input_)[0].float(), None)",
        "returns float32 [4, 32], expected bfloat16 [4, 32], for bfloat16 inputs of RowParallel",
    ),
    "GatedMLP": (
        "super().forward(x)[..., :3]",
        "returns float32 [4, 3], expected float32 [4, 32], for float32 inputs of GatedMLP",
    ),
    "VocabParallelEmbedding": (
        "super().forward(input_).T.contiguous().T",
        "returns a tensor that is not contiguous, with strides [1, 4], expected [32, 1], for ",
    ),
    "MLP": ("None", "returns 0 tensors, expected 1, for float32 inputs of MLP"),
}


@pytest.mark.parametrize("layer", OTHER_LAYERS)
def test_a_layer_that_returns_another_form(site: Site, layer: str) -> None:
    """The doctor compares a layer's result with that of the replaced class, and names the line."""
    result, words = OTHER_LAYERS[layer]
    site.plugin("acme", kernel(layer, PATCHED_LAYERS[layer], f"return {result}"))
    load_plugins()
    found = [*wrong_results_of_layers()]
    assert [each for each in found if words in each.message], found
    assert {each.location for each in found} == {f"{site.folder / 'acme.py'}:5"}


def test_layers_that_return_the_same(site: Site) -> None:
    """Layers that compute as their bases do are left alone."""
    site.plugin("acme", layers(""))
    load_plugins()
    assert [*wrong_results_of_layers()] == []


@pytest.mark.parametrize("told", EXITS)
def test_a_kernel_that_ends_a_comparison(
    capfd: pytest.CaptureFixture[str],
    site: Site,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: str,
) -> None:
    """``verify`` and ``tune`` tell of the exit as of any exception of a kernel, and end by themselves."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    source = kernel("RMSNorm", NORM, EXITS[told])
    site.plugin("acme", source.replace("platforms", "from opgraft.ops import SiLU\nplatforms"))
    with pytest.raises(SystemExit) as ended:
        run(capfd, "verify", str(llama), "--save", str(tmp_path / "case"))
    assert ended.value.code == 1
    out = " ".join(capfd.readouterr().out.split())
    assert f"it raised {told}" in out
    assert "rms_norm by Acme.forward_oot of acme 1.0" in out
    capfd.readouterr()
    opgraft.reset()
    assert cli._run(["tune", "rms_norm", "--seconds", "1e-4"]) == 1
    out = " ".join(capfd.readouterr().out.split())
    assert "rms_norm: acme was left out: at " in out
    assert f"it raised {told}" in out


@pytest.mark.parametrize("command", [("run", "the cat"), ("verify",)], ids=" ".join)
def test_an_op_class_that_ends_the_process(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, command: tuple[str, ...]
) -> None:
    """A constructor that raises SystemExit is named, and the exit code is opgraft's own."""
    site.plugin("acme", kernel("RMSNorm", CONSTRUCTOR, "raise SystemExit(3)"))
    name, *texts = command
    code, said = run(capfd, name, str(llama), *texts)
    assert code == 4
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: SystemExit: 3, raised in op rms_norm, by Acme.__init__ of acme")
    assert place(site) in line


WHILE_BUILT = {
    "an op": kernel("RMSNorm", CONSTRUCTOR, "raise ValueError('no such device')"),
    "a weight method": class_of(
        "opgraft.ops.linear.methods",
        "UnquantizedLinearMethod",
        "create_weights(self, *given, **others): raise ValueError('no such device')",
    ),
}


@pytest.mark.parametrize("case", WHILE_BUILT)
def test_a_class_that_raises_while_a_model_is_built(site: Site, llama: Path, case: str) -> None:
    """The error has the plugin, its line and the setting to go without it."""
    site.plugin("acme", WHILE_BUILT[case])
    words = r"ValueError: no such device, raised .*of acme 1\.0 at .*; to go without it: OPGRAFT_"
    with pytest.raises(PluginError, match=words) as told:
        LLM(str(llama), **SMALL)
    assert place(site).removeprefix("at ") in str(told.value)


NO_MEMORY = {
    "of a device": ("raise torch.OutOfMemoryError('no memory')", torch.OutOfMemoryError),
    "of the CPU": ("torch.empty(1 << 58)", RuntimeError),
}


@pytest.mark.parametrize("case", NO_MEMORY)
def test_a_model_that_is_too_large(site: Site, llama: Path, case: str) -> None:
    """The plugin that asked for memory last is not to blame, and the error stays what it is."""
    body, kind = NO_MEMORY[case]
    site.plugin(
        "acme", kernel("RMSNorm", CONSTRUCTOR, f"super().__init__(*args, **kwargs); {body}")
    )
    with pytest.raises(kind) as told:
        LLM(str(llama), **SMALL)
    assert "acme" not in str(told.value)


def end(number: int, frame: Any) -> None:
    """Handle a signal by ending the process."""
    raise SystemExit(number)


SENT = {
    "SIGINT": (signal.default_int_handler, KeyboardInterrupt),
    "SIGTERM": (end, SystemExit),
}


@pytest.mark.parametrize("name", SENT)
def test_a_signal_while_a_kernel_runs(site: Site, name: str) -> None:
    """Whoever has sent it ends the process; no plugin is accused."""
    handler, expected = SENT[name]
    source = kernel("RMSNorm", NORM, f"signal.raise_signal(signal.{name})")
    site.plugin("acme", f"import signal\n{source}")
    norm = RMSNorm(8)
    before = signal.signal(signal.Signals[name], handler)
    try:
        with pytest.raises(expected), exits_as_errors():
            norm(torch.ones(2, 8))
    finally:
        signal.signal(signal.Signals[name], before)


@pytest.mark.parametrize("told", ["OSError: no device", *EXITS])
def test_graft_names_the_plugin_whose_class_raises(site: Site, told: str) -> None:
    """The report says who raised in the constructor, not which adapter called it. Exits count, too."""
    source = kernel("LayerNorm", CONSTRUCTOR, EXITS.get(told, "raise OSError('no device')"))
    site.plugin("acme", source)
    report = opgraft.graft(nn.Sequential(nn.LayerNorm(8)))
    (row,) = report.left_alone
    assert row.reason.startswith(f"{told}, raised in op layer_norm, by Acme.__init__ of")
    assert place(site).removeprefix("at ") in row.reason


def test_a_constructor_that_forgets_its_base(site: Site) -> None:
    """An op without ``super().__init__()`` is told with its class, file and line when it is constructed."""
    site.plugin(
        "acme", kernel("RMSNorm", "__init__(self, *args, **kwargs)", "self.hidden_size = 8")
    )
    with pytest.raises(opgraft.errors.OpgraftError, match=r"Acme.*super\(\).__init__\(\)") as told:
        RMSNorm(8)
    assert f"{site.folder / 'acme.py'}:" in str(told.value)


CONSTRUCTED = {
    "by a function": "setup(self, args)",
    "by a function of another module": "acme_parts.setup(self, args)",
    "by an import within": "from acme_parts import setup; setup(self, args)",
    "by another class of the plugin": "self.build(*args)",
    "by a lookup": "getattr(super(), '__in' + 'it__')(*args)",
}
SETUP = """
from opgraft.ops import RMSNorm
def setup(op, args):
    RMSNorm.__init__(op, *args)
"""
PARTS = """
import acme_parts
from acme_parts import setup
class Parts:
    def build(self, *args):
        super().__init__(*args)
"""


@pytest.mark.parametrize("case", CONSTRUCTED)
def test_a_constructor_that_calls_its_base_elsewhere(site: Site, case: str) -> None:
    """A class that constructs well is no finding of the doctor."""
    source = kernel("RMSNorm", CONSTRUCTOR, CONSTRUCTED[case])
    source = source.replace("class Acme(", f"{PARTS}class Acme(Parts, ")
    (site.folder / "acme_parts.py").write_text(SETUP, encoding="utf-8")
    site.plugin("acme", source)
    load_plugins()
    assert list(RMSNorm(8).state_dict()) == ["weight"]
    assert list(unfinished_constructors()) == []


def test_a_constructor_that_makes_its_own_weight(site: Site) -> None:
    """Calls of torch, of Python and of opgraft construct no base."""
    body = "print(len(args)); self.made = torch.ones(int(args[0])); RMSNorm.register_oot"
    site.plugin("acme", kernel("RMSNorm", CONSTRUCTOR, body))
    load_plugins()
    (finding,) = unfinished_constructors()
    assert "does not call super().__init__()" in str(finding)
