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

import pytest
import torch
from opgraft.checkpoint import open_checkpoint
from opgraft.cli.run import read_lines
from opgraft.errors import InputError
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.runner import Progress, longest_input, nearest, open_runner

transformers = pytest.importorskip("transformers")


@pytest.fixture
def broken(causal_folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be broken."""
    return shutil.copytree(causal_folder, tmp_path / "checkpoint")


def run_json(cli, *arguments: str, **variables: str) -> dict:
    result = cli("run", *arguments, "--json", **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_causal_model_generates_the_same_text_grafted(cli, causal_folder, tmp_path) -> None:
    """Greedy generation and logits agree with the ungrafted model; norms, linears and attention are ours."""
    (tmp_path / "prompts.txt").write_text("the cat sleeps\n\na dog runs in the sun\n")
    report = run_json(cli, str(causal_folder), "--input", str(tmp_path / "prompts.txt"), "--compare")
    assert report["schema"] == "opgraft.run/2"
    assert len(report["answers"]) == 2
    assert report["comparison"]["same_answers"] is True
    assert report["comparison"]["largest_difference"] < 1e-5
    assert [side["name"] for side in report["comparison"]["sides"]] == ["plain", "grafted"]
    ops = {row["op"] for row in report["graft"]["replaced"]}
    assert {"rms_norm", "linear", "scaled_dot_product_attention", "gated_mlp"} <= ops


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plugin_swaps_ops_in_the_real_encoder(cli, toy_npu_site, dtype: str) -> None:
    """MiniLM on the toy NPU: the plugin's norms and GELUs run, and the answers are those of the plain model."""
    device = Path(__file__).parents[2] / "reference_plugins/opgraft-toy-npu/device.json"
    variables = {"PYTHONPATH": str(toy_npu_site), "TOY_NPU_DEVICE": str(device)}
    report = run_json(cli, "minilm", "--compare", "--dtype", dtype, **variables)
    assert report["platform"] == report["decision"]["chosen"] == "toy_npu"
    kernels = {row["implementation"] for row in report["graft"]["counts"]}
    assert {"ToyLayerNorm.forward_oot", "ToyGELU.forward_oot"} <= kernels
    assert report["comparison"]["same_answers"] is True
    assert report["comparison"]["largest_difference"] < {"float32": 1e-5, "bfloat16": 1.6e-2}[dtype]


def test_the_text_output(cli) -> None:
    """Answers, the platform in one line, the table of ops, the comparison; progress goes to stderr."""
    result = cli("run", "minilm", "--compare")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert "    -> A kitten is napping in the sun." in lines
    assert any(line.startswith("platform: cpu (") for line in lines)
    assert any(
        line.split() == ["13", "layer_norm", "LayerNorm.forward_native", "of", "opgraft", "0.1.0"] for line in lines
    )
    assert lines[-3].split() == ["model", "time", "of", "plain", "answers", "difference"]
    assert lines[-2].startswith("plain transformers ")
    assert re.match(r"grafted +[\d.]+ s +[\d.]+ +the same +\d\.\de", lines[-1])
    assert re.search(r"grafted, round 5 of 5: .*6 of 6", result.stderr)


def test_settings_reach_the_grafted_model(cli, causal_folder) -> None:
    """Dotted options hold while the model is grafted and run."""
    report = run_json(cli, str(causal_folder), "--compilation_config.custom_ops", '["none,+rms_norm"]')
    assert report["comparison"] is None
    assert {row["implementation"] for row in report["graft"]["replaced"] if row["op"] == "rms_norm"} == {
        "RMSNorm.forward_native"
    }


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
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def index(content: str) -> Callable[[Path], None]:
    """Harm that writes an index of shards, named after its content in the test's identifier."""

    def harm(folder: Path) -> None:
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
    configured(architectures="LlamaForCausalLM"): "architectures is 'LlamaForCausalLM', expected a list",
    configured(architectures=[3]): r"architectures is \[3\], expected a list",
    configured(hidden_size="x"): "cannot load .*hidden_size",
    configured(num_attention_heads=0): "cannot load",
    configured(model_type=["llama"]): "cannot load",
    configured(is_encoder_decoder=True): r"is an encoder with a decoder \(llama\)",
    encoder_decoder: r"is an encoder with a decoder \(t5\), which 'run' cannot drive",
    nested_config: "config.json cannot be read as JSON",
    huge_header: "is no whole safetensors file",
    garbled_tokenizer: "cannot load",
    break_config: "has no config.json",
    garble_config: r"config.json cannot be read as JSON",
    unknown_architecture: "cannot load",
    truncate: r"the file is cut short: \d+ of \d+ bytes are there",
    empty: "is no whole safetensors file",
    no_weights: "the weights are missing",
    pickle_only: r"only as a pickle \(pytorch_model.bin\), which is refused",
    missing_shard: r"model-00001-of-00002.safetensors is listed in model.safetensors.index.json and missing",
    no_tokenizer: "has no tokenizer.json",
}


@pytest.mark.parametrize("harm", BROKEN, ids=lambda harm: harm.__name__)
def test_a_broken_checkpoint_is_a_clear_error(broken: Path, harm) -> None:
    """Each missing, damaged or refused file is named, with the reason and the next step."""
    harm(broken)
    with pytest.raises(InputError, match=BROKEN[harm]) as caught:
        open_checkpoint(str(broken)).load(torch.float32)
    assert str(broken) in str(caught.value)
    assert caught.value.exit_code == 2


def test_code_in_a_checkpoint_is_never_run(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model or tokenizer that exists only as code in the folder is refused, without a question on the terminal."""
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("it asked whether to run the code"))
    (broken / "evil.py").write_text(f"open({str(broken / 'ran')!r}, 'w').close()\nclass Config: pass\nModel = Config\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    configured(auto_map=auto_map)(broken)
    model, _ = open_checkpoint(str(broken)).load(torch.float32)
    assert type(model) is transformers.LlamaForCausalLM, "transformers' own class of that name is taken"
    configured(model_type="never-heard-of")(broken)
    with pytest.raises(InputError, match=r"needs Python code of its own \(auto_map in config.json\), which is refused"):
        open_checkpoint(str(broken)).load(torch.float32)
    assert not (broken / "ran").exists()


def encoder_folder(config: Any, model: Any, tokenizer: Any, folder: Path) -> str:
    """A random encoder of one layer, saved as a checkpoint folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model(config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


QUIET: Progress = lambda label, done, total: None  # noqa: E731


@pytest.mark.parametrize(("padding", "table", "longest"), [(1, 66, 64), (4, 66, 61), (1, 600, 100), (1, 600, 598)])
def test_a_long_line_is_cut_to_what_the_model_takes(
    tokenizer, tmp_path, padding: int, table: int, longest: int
) -> None:
    """A RoBERTa counts positions from behind that of padding, and a tokenizer may allow fewer tokens than the model."""
    config = partial(transformers.RobertaConfig, max_position_embeddings=table, pad_token_id=padding)
    small = copy.deepcopy(tokenizer)
    small.pad_token = small.convert_ids_to_tokens(padding)
    if longest == 100:
        small.model_max_length = longest
    runner = open_runner(
        open_checkpoint(encoder_folder(config, transformers.RobertaModel, small, tmp_path)), torch.float32
    )
    assert runner.limit == longest
    output = runner.run(["the cat sleeps " * 1000, "a dog runs"], QUIET, "")
    assert output.numbers.isfinite().all()


def test_a_bert_takes_all_its_positions(tokenizer, tmp_path) -> None:
    """Without an offset every row of the table serves a token, and without either limit 512 tokens are taken."""
    config = partial(transformers.BertConfig, max_position_embeddings=48, pad_token_id=0)
    runner = open_runner(
        open_checkpoint(encoder_folder(config, transformers.BertModel, tokenizer, tmp_path)), torch.float32
    )
    assert runner.limit == 48
    runner.run(["the cat sleeps " * 1000], QUIET, "")
    del runner.model.config.max_position_embeddings
    assert longest_input(runner.model, tokenizer) == 512


def test_a_long_prompt_is_cut_at_its_beginning(tokenizer, tmp_path) -> None:
    """A causal model with a table of positions generates after the end of a prompt that is longer than the table."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=2, pad_token_id=0, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    runner = open_runner(open_checkpoint(str(tmp_path)), torch.float32)
    long, end = runner.run(["bread " * 1000 + "the cat " * 8, "the cat " * 8], QUIET, "").numbers
    assert torch.equal(long, end)


def test_an_encoder_without_padding_is_refused(tokenizer, tmp_path) -> None:
    """Batches of sentences need a pad token, and a tokenizer without one is said to lack it."""
    config = partial(transformers.BertConfig, pad_token_id=0)
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    folder = encoder_folder(config, transformers.BertModel, bare, tmp_path)
    with pytest.raises(InputError, match="a tokenizer without a pad_token"):
        open_checkpoint(folder).load(torch.float32)


@pytest.mark.parametrize("name", ["minilm", "causal"])
def test_model_and_inputs_are_on_the_platforms_device(monkeypatch, causal_folder, name: str) -> None:
    """Both are moved to the device type of the platform before the model is called."""
    monkeypatch.setattr(CpuPlatform, "device_type", "meta")
    runner = open_runner(open_checkpoint(str(causal_folder) if name == "causal" else name), torch.float32)
    assert {parameter.device.type for parameter in runner.model.parameters()} == {"meta"}

    class Called(Exception):  # noqa: N818  # the end of the test, not an error
        pass

    def look(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        assert {tensor.device.type for tensor in kwargs.values()} == {"meta"}
        raise Called

    runner.model.register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(Called, match=r"^$"):
        runner.run(["the cat sleeps"], QUIET, "")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["minilm", "causal"])
def test_the_model_runs_on_a_gpu(causal_folder, name: str) -> None:
    """On a machine with a GPU the model runs there, and what is compared comes back to the CPU."""
    runner = open_runner(open_checkpoint(str(causal_folder) if name == "causal" else name), torch.float32)
    assert {parameter.device.type for parameter in runner.model.parameters()} == {"cuda"}
    output, _, comparison = runner.compare(["the cat sleeps", "a dog runs in the sun"], QUIET)
    assert output.numbers.device.type == "cpu"
    assert comparison.same_answers
    assert comparison.largest_difference < 1e-3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n  \n", "is empty"),
        ("caf\xe9".encode("latin-1"), r"is not UTF-8 \(byte 3\)"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_input_file_is_a_clear_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    """Empty, undecodable and missing files are told apart, before any model is loaded."""
    file = tmp_path / "input.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_lines(file)


def test_first_token_pooling_is_read_from_the_folder(broken: Path) -> None:
    """A sentence-transformers folder says how tokens become a sentence."""
    assert open_checkpoint(str(broken)).pooling == ("mean",)
    (broken / "1_Pooling").mkdir()
    (broken / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert open_checkpoint(str(broken)).pooling == ("cls",)


def test_the_order_of_the_texts_does_not_change_embeddings() -> None:
    """Batches are sorted by length inside; the rows come back in the order of the input."""
    runner = open_runner(open_checkpoint("minilm"), torch.float32)
    texts = ["A cat.", "The train to the coast leaves the old station at noon every day.", "Bread."]
    forward = runner.run(texts, QUIET, "").numbers
    backward = runner.run(texts[::-1], QUIET, "").numbers
    torch.testing.assert_close(forward, backward.flip(0))


def test_nearest_neighbours() -> None:
    """The nearest other row by cosine; a single row is its own neighbour."""
    rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), dim=-1)
    assert nearest(rows) == [1, 0, 1]
    assert nearest(rows[:1]) == [0]
