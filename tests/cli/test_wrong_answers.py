"""Checkpoints from which ``opgraft run`` would answer something, and not what their model says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from opgraft.cli.neighbours import nearest
from opgraft.errors import InputError
from opgraft.models.files import open_weights
from opgraft.models.pooling import POOLINGS, pooled, pooling_modes
from opgraft.models.sentences import SentenceSettings
from opgraft.serving.llm import LLM

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")

WORDS = ["[PAD]", "[UNK]", "</s>", "the", "cat", "dog", "sleeps", "runs"]
SMALL = {"load.progress": False, "cache.num_blocks": 300}


@pytest.fixture(scope="module")
def tokenizer():
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: index for index, word in enumerate(WORDS)},
            unk_token="[UNK]",  # noqa: S106
        )
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def save(model, tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def causal(tokenizer, tmp_path: Path) -> Path:
    """A random Llama of two layers."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), pad_token_id=0, eos_token_id=2, **sizes
    )
    return save(transformers.LlamaForCausalLM(config), tokenizer, tmp_path / "causal")


@pytest.fixture
def bert() -> Callable[..., object]:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return lambda **options: transformers.BertConfig(vocab_size=len(WORDS), **{**sizes, **options})


PACKAGE = "sentence_transformers.sentence_transformer.modules"
MODULES = [
    {"path": "", "type": f"{PACKAGE}.transformer.Transformer"},
    {"path": "1_Pooling", "type": f"{PACKAGE}.pooling.Pooling"},
]


@pytest.fixture
def encoder(tokenizer, tmp_path: Path, bert) -> Path:
    """A random BERT of two layers."""
    torch.manual_seed(0)
    return save(transformers.BertModel(bert()), tokenizer, tmp_path / "encoder")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.load_file(file)
    change(weights)
    safetensors.save_file(weights, file, metadata={"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def lose_one(weights: dict[str, torch.Tensor]) -> None:
    del weights[next(name for name in weights if "layer" in name and "weight" in name)]


def rename_all(weights: dict[str, torch.Tensor]) -> None:
    for name in list(weights):
        weights[f"other.{name}"] = weights.pop(name)


@pytest.mark.parametrize("kind", ["causal", "encoder"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: change_weights(folder, lose_one), "is missing"),
        (lambda folder: change_weights(folder, rename_all), "is missing"),
        (lambda folder: change_config(folder, num_hidden_layers=1), "has no place"),
        (lambda folder: change_config(folder, num_hidden_layers=3), "is missing"),
    ],
    ids=["lost", "foreign", "too many layers", "too few layers"],
)
def test_weights_of_another_model_are_refused(request, kind: str, change, message: str) -> None:
    """Where the model would get random numbers, or leave out what the files hold, nothing is answered."""
    folder = request.getfixturevalue(kind)
    LLM(str(folder), **SMALL)
    change(folder)
    with pytest.raises(InputError, match=message):
        LLM(str(folder), **SMALL)


def test_the_command_ends_with_2(cli, causal: Path) -> None:
    """The command says what is missing, and prints no answer."""
    change_weights(causal, lose_one)
    result = cli("run", str(causal), "the cat")
    assert (result.returncode, result.stdout) == (2, "")
    assert "is missing" in result.stderr


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_parts_that_no_answer_needs(tokenizer, tmp_path: Path, bert, family: str) -> None:
    """A masked language model has a head that embeddings go without, and no pooler: its vectors are the encoder's."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**bert(pad_token_id=0).to_dict(), "model_type": family.lower()}
    )
    masked = getattr(transformers, f"{family}ForMaskedLM")(config)
    folders = (
        save(masked, tokenizer, tmp_path / "masked"),
        save(masked.base_model, tokenizer, tmp_path / "base"),
    )
    change_config(folders[0], architectures=[f"{family}ForMaskedLM"])
    vectors = [LLM(str(folder), **SMALL).embed("the cat")[0].embedding for folder in folders]
    assert vectors[0] == vectors[1]


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_poolings_are_those_of_sentence_transformers(mode: str, padding_side: str) -> None:
    """Every mode gives the vectors that sentence-transformers gives, with padding on either side."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    torch.manual_seed(0)
    states, mask = (
        torch.randn(3, 5, 4),
        torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]),
    )
    mask = mask if padding_side == "right" else mask.flip(1)
    theirs = modules.Pooling(4, mode)({"token_embeddings": states, "attention_mask": mask})[
        "sentence_embedding"
    ]
    torch.testing.assert_close(pooled(states, mask, [mode]), theirs)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["cls", "max"]}, ("cls", "max")),
        ({"pooling_mode": "max", "pooling_mode_mean_tokens": True}, ("max",)),
        ({"pooling_mode_cls_token": True}, ("cls",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, ("max",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean")),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({}, ("mean",)),
    ],
)
def test_pooling_settings(settings: dict, modes: tuple[str, ...]) -> None:
    """The newer and the older form of the settings are read alike."""
    assert pooling_modes(settings) == modes


@pytest.mark.parametrize("value", ["middle", [], ["cls", 3], 7, {"a": 1}])
def test_an_unknown_pooling_is_refused(encoder: Path, value: object) -> None:
    """A mode that is not known is an error with the file's name, not the mean."""
    (encoder / "1_Pooling").mkdir()
    (encoder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": value}))
    (encoder / "modules.json").write_text(json.dumps(MODULES))
    with pytest.raises(InputError, match=r"1_Pooling/config\.json: the pooling mode"):
        SentenceSettings.of(open_weights(str(encoder)))


def test_modules_of_a_sentence_encoder(encoder: Path) -> None:
    """The list of modules says where the pooling is set; a layer behind it, which would be left out, is refused."""
    (encoder / "2_Pooling").mkdir()
    (encoder / "2_Pooling/config.json").write_text('{"pooling_mode": "max"}')
    transformer, pooling = MODULES
    rows = [transformer, {**pooling, "path": "2_Pooling"}]
    (encoder / "modules.json").write_text(json.dumps(rows))
    assert SentenceSettings.of(open_weights(str(encoder))).pooling == ("max",)
    (encoder / "modules.json").write_text(
        json.dumps([*rows, {"path": "3_Dense", "type": f"{PACKAGE}.Dense"}])
    )
    with pytest.raises(InputError, match="lists a module 'Dense'"):
        SentenceSettings.of(open_weights(str(encoder)))
    (encoder / "modules.json").write_text(json.dumps([{"path": "../../etc", "type": "a.Pooling"}]))
    with pytest.raises(InputError, match="leads out of the checkpoint"):
        SentenceSettings.of(open_weights(str(encoder)))


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "someone/evil@main:attention"},
        {"attn_implementation": {"": "sdpa", "text_config": "someone/evil"}},
        {"text_config": {"layers": [{"_attn_implementation_internal": "someone/evil"}]}},
        {"experts_implementation": "someone/evil"},
        {"attn_implementation": "flash_attention_2"},  # taken from a hub where it is not installed
    ],
)
def test_a_config_chooses_no_kernels_from_a_hub(causal: Path, values: dict) -> None:
    """A setting that may have code fetched and run is refused wherever it stands."""
    change_config(causal, **values)
    with pytest.raises(InputError, match="which is refused: transformers may take it from a hub"):
        LLM(str(causal), **SMALL)


def test_implementations_of_transformers_itself_are_fine(causal: Path) -> None:
    """What needs no hub may be chosen."""
    change_config(causal, attn_implementation="eager", _attn_implementation_autoset=True)
    LLM(str(causal), **SMALL)


@pytest.mark.parametrize("kind", ["causal", "encoder"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_no_answer(request, cli, kind: str, value: float) -> None:
    """A model that computes NaN ends with an error that says so, instead of an answer or a comparison."""
    folder = request.getfixturevalue(kind)
    change_weights(
        folder,
        lambda weights: [weights[name].fill_(value) for name in weights if "norm" in name.lower()],
    )
    for options in ((), ("--compare",)):
        result = cli(
            "run", str(folder), "the cat", "the dog", "--cache.num_blocks", "300", *options
        )
        assert result.returncode == 2
        assert "NaN" in result.stderr


def test_the_nearest_of_many() -> None:
    """The nearest of each row are those of the whole matrix, of which only a part is held at a time."""
    torch.manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(6000, 8), dim=-1)
    whole = (embeddings @ embeddings.T).fill_diagonal_(-torch.inf).argmax(1).tolist()
    assert nearest(embeddings) == whole
    assert nearest(embeddings[:1]) == [0]
    assert nearest(embeddings[:0]) == []


def test_twenty_thousand_lines_need_no_matrix(warm_python: str) -> None:
    """The process grows by less than 512 MiB, where 20,000 x 20,000 numbers would take 1.5 GiB."""
    code = (
        "import resource, torch\nfrom opgraft.cli.neighbours import nearest\ntorch.set_num_threads(1)\n"
        "x = torch.nn.functional.normalize(torch.randn(20_000, 4), dim=-1); nearest(x[:5000])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nassert len(nearest(x)) == 20_000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    result = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1 << 19  # KiB
