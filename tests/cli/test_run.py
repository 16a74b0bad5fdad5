"""opgraft run: real checkpoints, real text, and files that are broken."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from opgraft.checkpoint import open_checkpoint
from opgraft.cli.run import read_lines
from opgraft.errors import InputError
from opgraft.runner import nearest, open_runner

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["the", "a", "cat", "dog", "sleeps", "runs", "on", "mat", "in", "sun", "bread", "bakes", "well"]


@pytest.fixture(scope="session")
def tokenizer():
    """A word-level tokenizer made on the spot."""
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "</s>", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106  # no secret
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.fixture(scope="session")
def causal_folder(tokenizer, tmp_path_factory) -> Path:
    """A random Llama of two layers, saved as a checkpoint folder."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("causal")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    assert report["schema"] == "opgraft.run/1"
    assert len(report["answers"]) == 2
    assert report["comparison"]["same_answers"] is True
    assert report["comparison"]["largest_difference"] < 1e-5
    ops = {row["op"] for row in report["graft"]["replaced"]}
    assert {"rms_norm", "linear", "scaled_dot_product_attention", "silu"} <= ops


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plugin_swaps_ops_in_the_real_encoder(cli, toy_npu_site, dtype: str) -> None:
    """MiniLM on the toy NPU: the plugin's norms and GELUs run, and the answers are those of the plain model."""
    device = Path(__file__).parents[2] / "reference_plugins/opgraft-toy-npu/device.json"
    variables = {"PYTHONPATH": str(toy_npu_site), "TOY_NPU_DEVICE": str(device)}
    report = run_json(cli, "minilm", "--compare", "--dtype", dtype, **variables)
    assert report["platform"]["chosen"] == "toy_npu"
    kernels = {row["implementation"] for row in report["graft"]["replaced"]}
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
    assert any(line.startswith("against the ungrafted model: the same answers, largest difference") for line in lines)
    assert lines[-1].startswith("time: plain ")
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


BROKEN = {
    break_config: "has no config.json",
    garble_config: r"config.json cannot be read as JSON",
    unknown_architecture: "cannot load",
    truncate: "is no whole safetensors file",
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
    assert not open_checkpoint(str(broken)).pools_first_token
    (broken / "1_Pooling").mkdir()
    (broken / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert open_checkpoint(str(broken)).pools_first_token


def test_the_order_of_the_texts_does_not_change_embeddings() -> None:
    """Batches are sorted by length inside; the rows come back in the order of the input."""
    runner = open_runner(open_checkpoint("minilm"), torch.float32)
    texts = ["A cat.", "The train to the coast leaves the old station at noon every day.", "Bread."]
    quiet = lambda label, done, total: None  # noqa: E731
    forward = runner.run(texts, quiet, "").numbers
    backward = runner.run(texts[::-1], quiet, "").numbers
    torch.testing.assert_close(forward, backward.flip(0))


def test_nearest_neighbours() -> None:
    """The nearest other row by cosine; a single row is its own neighbour."""
    rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), dim=-1)
    assert nearest(rows) == [1, 0, 1]
    assert nearest(rows[:1]) == [0]
