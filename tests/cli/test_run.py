"""opgraft run: real checkpoints, real text, and files that are broken."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft.cli.neighbours import nearest
from opgraft.cli.run import read_lines
from opgraft.compat.python_device import why_not
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.errors import InputError, ModelError, OpgraftError
from opgraft.serving.llm import LLM
from support.simulated_device import FORMS

transformers = pytest.importorskip("transformers")

SMALL = ("--cache.num_blocks", "300", "--load.progress", "false")
QUIET = {"load.progress": False}


@pytest.fixture
def broken(causal_folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be broken."""
    return shutil.copytree(causal_folder, tmp_path / "checkpoint")


def run_json(cli, *arguments: str, **variables: str) -> dict:
    result = cli("run", *arguments, "--json", *SMALL, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_decoder_answers_alike_on_native_definitions(
    in_one_round, causal_folder, tmp_path
) -> None:
    """Lines of a file are prompts; tokens and logits agree, and both speeds are those of the same tokens."""
    (tmp_path / "prompts.txt").write_text("the cat sleeps\n\na dog runs in the sun\n")
    prompts = str(tmp_path / "prompts.txt")
    report = run_json(in_one_round, str(causal_folder), "--input", prompts, "--compare")
    assert report["schema"] == "opgraft.answer/2"
    assert [answer["prompt"] for answer in report["answers"]] == [
        "the cat sleeps",
        "a dog runs in the sun",
    ]
    comparison = report["comparison"]
    assert comparison["same_answers"] is True
    assert comparison["largest_difference"] < 1e-5
    tokens = {
        round(side["seconds"] * side["tokens_per_second"])
        for side in (comparison["plain"], comparison["grafted"])
    }
    assert tokens == {sum(len(answer["tokens"]) for answer in report["answers"])}


def test_a_decoder_answers_alike_when_compiled(cli, causal_folder, tmp_path) -> None:
    """--compile -O1 has the steps computed by one graph, which gives the same tokens; -O0 leaves the model as it is."""
    answers = {}
    for level in ("-O0", "-O1"):
        graphs = tmp_path / level
        dumped = ("--compilation_config.dump_graphs", str(graphs)) if level == "-O1" else ()
        report = run_json(
            cli, str(causal_folder), "the cat", "--max-tokens", "4", "--compile", level, *dumped
        )
        answers[level] = report["answers"][0]["tokens"]
        assert graphs.exists() == (level == "-O1")
    assert answers["-O0"] == answers["-O1"]


def test_a_machine_compiles_once(cold_cli, causal_folder, tmp_path, monkeypatch) -> None:
    """The second ``-O2`` takes code from the default folder: it finds no compiler, adds nothing, and answers alike."""
    monkeypatch.delenv("OPGRAFT_COMPILATION_CONFIG_CACHE")
    monkeypatch.delenv("CXX", raising=False)
    cache = {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    asked = (str(causal_folder), "the cat", "--max-tokens", "4", "-O2")
    first = run_json(cold_cli, *asked, **cache)
    kept = {path.name for path in (tmp_path / "opgraft" / "compiled").iterdir()}
    assert kept
    second = run_json(cold_cli, *asked, **cache, PATH="")
    assert second["answers"][0]["tokens"] == first["answers"][0]["tokens"]
    assert {path.name for path in (tmp_path / "opgraft" / "compiled").iterdir()} == kept


@pytest.mark.skipif(bool(why_not()), reason="this torch takes a device's guard in C++ only")
@pytest.mark.parametrize("options", FORMS, ids=" ".join)
def test_a_decoder_answers_alike_on_a_simulated_device(
    cli, causal_folder, options: tuple[str, ...]
) -> None:
    """Tokens are those of the CPU: alone, by two workers, compiled, both, and recorded. The report names the device."""
    asked = (str(causal_folder), "the cat", "--max-tokens", "4", "--dtype", "float32")
    expected = run_json(cli, *asked)["answers"][0]["tokens"]
    report = run_json(cli, *asked, *options, **{SIMULATED_DEVICE: "default"})
    assert report["platform"] == "simulated"
    assert report["answers"][0]["tokens"] == expected


DAMAGING = """
import opgraft
from opgraft.ops import RMSNorm
platforms = ("cpu",)
class Doubling(RMSNorm):
    def forward_native(self, x, residual=None):
        out = super().forward_native(x, residual)
        return out * 2 if residual is None else (out[0] * 2, out[1])
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Doubling)
"""


def test_plain_is_the_model_without_plugins(in_one_round, site, causal_folder) -> None:
    """What a plugin's replacement does wrong, in its native definition even, is a difference from the plain model."""
    site.plugin("damaging", DAMAGING)
    asked = (str(causal_folder), "the cat", "--compare", "--max-tokens", "4")
    report = run_json(in_one_round, *asked)
    assert "Doubling" in {row["class"] for row in report["ops"]}
    assert report["comparison"]["largest_difference"] > 1e-3


@pytest.mark.usefixtures("toy_npu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plugin_swaps_ops_in_the_real_encoder(in_one_round, dtype: str) -> None:
    """MiniLM on the toy NPU: the plugin's norms run, and the answers are those of native definitions."""
    report = run_json(in_one_round, "minilm", "--compare", "--dtype", dtype)
    assert report["platform"] == report["decision"]["chosen"] == "toy_npu"
    assert "ToyLayerNorm.forward_oot" in {row["kernel"] for row in report["ops"]}
    assert report["comparison"]["same_answers"] is True
    assert report["comparison"]["largest_difference"] < {"float32": 1e-5, "bfloat16": 1.6e-2}[dtype]


def test_the_text_output(in_one_round) -> None:
    """Texts with their nearest, the table of kernels, the comparison."""
    result = in_one_round("run", "minilm", "--compare", *SMALL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "  -> A kitten is napping in the sun." in lines
    assert any(
        line.split() == ["13", "layer_norm", "LayerNorm.forward_native", "of", "opgraft", "0.1.0"]
        for line in lines
    )
    assert lines[-3].split() == [
        "model",
        "time",
        "tokens",
        "per",
        "second",
        "answers",
        "difference",
    ]
    assert re.match(r"plain +[\d.]+ s +[\d.]+$", lines[-2])
    assert re.match(r"grafted +[\d.]+ s +[\d.]+ +the same +\d\.\de", lines[-1])


def test_of_many_texts_the_first_are_shown(cli, tmp_path) -> None:
    """Text shows six and counts the others; JSON has all."""
    (tmp_path / "lines.txt").write_text("".join(f"Number {n}.\n" for n in range(9)))
    shown = cli("run", "minilm", "--input", str(tmp_path / "lines.txt"), *SMALL).stdout
    assert "and 3 more" in shown
    assert shown.count("  -> ") == 6
    assert len(run_json(cli, "minilm", "--input", str(tmp_path / "lines.txt"))["embeddings"]) == 9


def test_settings_reach_the_model(cli, causal_folder) -> None:
    """Dotted options hold while the model is made and run."""
    report = run_json(
        cli, str(causal_folder), "the cat", "--compilation_config.custom_ops", '["none,+rms_norm"]'
    )
    assert report["comparison"] is None
    assert {row["kernel"] for row in report["ops"] if row["op"] == "rms_norm"} == {
        "RMSNorm.forward_native"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smollm2", "hi", "--input", "lines.txt"), "PROMPT and --input exclude each other"),
        (("smollm2", "hi", "--compare", "--temperature", "1"), "leave --temperature out"),
        (("smollm2",), "answers a prompt, and none is given: opgraft run MODEL"),
    ],
)
def test_arguments_that_contradict_each_other(
    cli, arguments: tuple[str, ...], message: str
) -> None:
    """They are usage errors, before a model is loaded."""
    result = cli("run", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


def break_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder: Path) -> None:
    index('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')(folder)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def index(content: str) -> Callable[[Path], None]:
    """Harm that writes an index, named after its content in the test's identifier, in the place of the whole file."""

    def harm(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    harm.__name__ = f"index {content[:50]}"
    return harm


def configured(**values: object) -> Callable[[Path], None]:
    """Harm that writes other values into ``config.json``."""

    def harm(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    harm.__name__ = f"config {values}"
    return harm


def nested_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}" * 100)


def garbled_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": 1}')


def encoder_decoder(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')


NO_MAP = r"model.safetensors.index.json has no weight_map from tensor names to file names"
BROKEN = {
    index('{"weight_map": []}'): NO_MAP,
    index('{"weight_map": {"a": "model.safetensors", "b": 1, "c": null}}'): NO_MAP,
    index('{"a": 1}'): NO_MAP,
    index("null"): "holds a NoneType, expected a JSON object",
    index(
        '{"weight_map": {"a": "../other/model.safetensors"}}'
    ): r"names the file '../other/model.safetensors', which is",
    index('{"weight_map": {"a": "/other/model.safetensors"}}'): "which is refused",
    index('{"weight_map": {"a": ".."}}'): "which is refused",
    configured(architectures=3): "architectures is 3, expected a list of class names",
    configured(
        architectures="LlamaForCausalLM"
    ): "architectures is 'LlamaForCausalLM', expected a list",
    configured(architectures=[3]): r"architectures is \[3\], expected a list",
    configured(hidden_size="x"): "cannot read the configuration .*hidden_size",
    configured(num_attention_heads=0): "cannot read the configuration",
    configured(model_type=["llama"]): "cannot read the configuration",
    configured(is_encoder_decoder=True): r"is an encoder with a decoder \(llama\)",
    encoder_decoder: r"is an encoder with a decoder \(t5\), which no model here is",
    nested_config: "config.json cannot be read as JSON",
    huge_header: "is no whole safetensors file",
    garbled_tokenizer: "is no tokenizer that can be read",
    break_config: "has no config.json",
    garble_config: r"config.json cannot be read as JSON",
    unknown_architecture: "which neither transformers .* nor an active plugin has.* opgraft plugins doctor",
    truncate: r"the file is cut short: \d+ of \d+ bytes are there",
    empty: "is no whole safetensors file",
    no_weights: r"has a config.json but no \*.safetensors and no \*.gguf file: the weights are missing",
    pickle_only: r"only as a pickle \(pytorch_model.bin\), which is refused",
    missing_shard: r"model-00001-of-00002.safetensors is listed in model.safetensors.index.json and missing",
    no_tokenizer: "cannot load the tokenizer",
}


@pytest.mark.parametrize("harm", BROKEN, ids=lambda harm: harm.__name__)
def test_a_broken_checkpoint_is_a_clear_error(broken: Path, harm) -> None:
    """Each missing, damaged or refused file is named, with the reason and the next step."""
    harm(broken)
    with pytest.raises(OpgraftError, match=BROKEN[harm]) as caught:
        LLM(str(broken), **{"cache.num_blocks": 300}, **QUIET)
    assert str(broken) in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_architecture_without_a_name(broken: Path) -> None:
    """The error lists what is written here, not the hundreds of names that transformers has."""
    (broken / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelError, match=r"\(none is named\): known: (\w+, ){10,40}\w+\. A plugin adds"
    ):
        LLM(str(broken), **QUIET)


def test_code_in_a_checkpoint_is_never_run(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model or tokenizer that exists only as code in the folder is refused, without a question on the terminal."""
    monkeypatch.setattr(
        "builtins.input", lambda *args: pytest.fail("it asked whether to run the code")
    )
    (broken / "evil.py").write_text(
        f"open({str(broken / 'ran')!r}, 'w').close()\nclass Config: pass\nModel = Config\n"
    )
    auto_map = {
        "AutoConfig": "evil.Config",
        "AutoModel": "evil.Model",
        "AutoModelForCausalLM": "evil.Model",
    }
    configured(auto_map=auto_map)(broken)
    LLM(str(broken), **{"cache.num_blocks": 300}, **QUIET)
    configured(model_type="never-heard-of")(broken)
    with pytest.raises(
        OpgraftError,
        match=r"config.json needs Python code of its own \(auto_map\), which is refused",
    ):
        LLM(str(broken), **QUIET)
    assert not (broken / "ran").exists()


@pytest.mark.parametrize(
    ("padding", "table", "longest"), [(1, 66, 64), (4, 66, 61), (1, 600, 100), (1, 600, 598)]
)
def test_a_long_line_is_cut_to_what_the_model_takes(
    tokenizer, tmp_path, padding: int, table: int, longest: int
) -> None:
    """A RoBERTa counts positions from behind that of padding, and a tokenizer may allow fewer tokens than the model."""
    small = copy.deepcopy(tokenizer)
    small.pad_token = small.convert_ids_to_tokens(padding)
    if longest == 100:
        small.model_max_length = longest
    config = partial(
        transformers.RobertaConfig, max_position_embeddings=table, pad_token_id=padding
    )
    folder = encoder_folder(config, transformers.RobertaModel, small, tmp_path)
    long, _ = LLM(folder, **QUIET).embed(["the cat sleeps " * 1000, "a dog runs"], truncate=True)
    assert len(long.prompt_token_ids) == longest


def encoder_folder(config: Any, model: Any, tokenizer: Any, folder: Path) -> str:
    """A random encoder of one layer, saved as a checkpoint folder."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model(config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.gpu
def test_the_models_run_on_a_gpu(cli, causal_folder) -> None:
    """On a machine with a GPU both kinds run there, and agree with native definitions."""
    for arguments in (("minilm",), (str(causal_folder), "the cat sleeps")):
        report = run_json(cli, *arguments, "--compare")
        assert report["platform"] == opgraft.current_platform().name != "cpu"
        assert report["comparison"]["largest_difference"] < 1e-3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n  \n", "is empty"),
        ("caf\xe9".encode("latin-1"), r"is not UTF-8 \(byte 3\)"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_input_file_is_a_clear_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    """Empty, undecodable and missing files are told apart, before any model is loaded."""
    file = tmp_path / "input.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_lines(file)


def test_nearest_neighbours() -> None:
    """The nearest other row by cosine, whatever the lengths; a single row is its own neighbour."""
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 9.0]])
    assert nearest(rows) == [1, 0, 1]
    assert nearest(rows[:1]) == [0]
