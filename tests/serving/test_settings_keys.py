"""Each key of a settings file is read as transformers and sentence-transformers do, refused by name, or harmless."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import LLM
from opgraft.errors import CheckpointError, RequestError
from opgraft.models.files import Weights
from opgraft.models.settings_keys import (
    CONFIG_SENTENCE_TRANSFORMERS,
    GGUF_GENERAL,
    GGUF_TOKENIZER,
    SENTENCE_BERT_CONFIG,
    TOKENIZER_CONFIG,
    row_of,
)
from opgraft.serving import tokenizer_classes
from opgraft.serving.tokenizer import _from_folder, open_tokenizer
from opgraft.serving.tokenizer_classes import usual_tokens
from record_tokenizer_classes import recorded, written
from support.small_tokenizers import trained_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
gguf = pytest.importorskip("gguf")

TEXTS = (
    "",
    "the cat",
    "  The CAT sat, on (the) mat!",
    "a <x> b <y>c <z> ",
    "été <mask> naïve <s>",
    " don't , stop .",
)


@pytest.fixture(scope="module")
def byte_level() -> str:
    """A ``tokenizer.json`` of GPT-2's kind, with an added token."""
    tokenizer = trained_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("<x>", special=True), "<mask>"])
    return str(tokenizer.to_str())


def bert_tokenizer() -> str:
    """A ``tokenizer.json`` of BERT's kind."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set("".join(TEXTS)) - {" "})
    words = [*special, "the", "The", "cat", "naive", *letters, *(f"##{each}" for each in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    fast = transformers.BertTokenizer(vocab=vocabulary)
    return str(fast.backend_tokenizer.to_str())


def llama_tokenizer() -> str:
    """A ``tokenizer.json`` of Llama 2's kind, which puts a space before each piece of a text."""
    letters = ["<unk>", "<s>", "</s>", "\u2581", *sorted(set("".join(TEXTS)) - {" "}), "\u2581c"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=[("\u2581", "c")],
        unk_token="<unk>",  # noqa: S106  # no secret
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    steps = [
        tokenizers.normalizers.Prepend("\u2581"),
        tokenizers.normalizers.Replace(" ", "\u2581"),
    ]
    tokenizer.normalizer = tokenizers.normalizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.Replace("\u2581", " ")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(tokenizer.to_str())


def folder_with(folder: Path, tokenizer: str, kind: str, settings: dict[str, Any]) -> Path:
    """Write a checkpoint's tokenizer, for the ``model_type`` kind."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    files = settings.pop("files", {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def assert_as_transformers(folder: Path) -> None:
    """Compare ids, text and special tokens."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(Weights(folder, {}))
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.truncation_side == theirs.truncation_side
    assert ours.vocab_size == len(theirs)


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
STRIPPING = {"__type": "AddedToken", "content": "<y>", "lstrip": True, "special": True}
BYTE_LEVEL: dict[str, dict[str, Any]] = {
    "bos_token": {"bos_token": "<s>"},
    "eos_token": {"eos_token": "<x>"},
    "unk_token": {"unk_token": "<x>"},
    "sep_token": {"sep_token": "<y>"},
    "pad_token": {"pad_token": "<z>"},
    "cls_token": {"cls_token": STRIPPING},
    "mask_token": {"mask_token": "<mask>"},
    "*_token": {"image_token": "<y>", "video_token": STRIPPING | {"content": "<z>"}},
    "additional_special_tokens": {"additional_special_tokens": ["<z>", "<y>"], "eos_token": "<y>"},
    "extra_special_tokens": {"extra_special_tokens": ["<z>", STRIPPING]},
    "additional_special_tokens that are not special": {
        "additional_special_tokens": ["<z>", STRIPPING | {"special": False}]
    },
    "a named token that is listed with flags": {
        "bos_token": "<y>",
        "additional_special_tokens": ["<z>", STRIPPING],
    },
    "tokens in a list and tokens by name": {
        "additional_special_tokens": ["<z>"],
        "extra_special_tokens": {"boi_token": "<y>"},
    },
    "extra_special_tokens by name": {"extra_special_tokens": {"boi_token": "<z>"}},
    "model_specific_special_tokens": {"model_specific_special_tokens": {"boi_token": "<y>"}},
    "added_tokens_decoder": {
        "added_tokens_decoder": {
            "400": {"content": "<x>", "lstrip": True, "special": True},
            "401": {"content": "<mask>", "rstrip": True, "special": True},
            "402": {"content": "<z>", "special": False, "normalized": False},
        },
        "mask_token": "<mask>",
        "eos_token": "<y>",
    },
    "special_tokens_map.json": {
        "eos_token": "<s>",
        "files": {
            "special_tokens_map.json": {
                "eos_token": {"content": "<y>", "lstrip": True},
                "additional_special_tokens": ["<z>"],
            },
            "added_tokens.json": {"<z>": 403, "<y>": 402},
        },
    },
    "truncation_side": {"truncation_side": "left"},
    "split_special_tokens": {"split_special_tokens": True, "eos_token": "<y>"},
    "clean_up_tokenization_spaces": {"clean_up_tokenization_spaces": True},
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    },
    "add_prefix_space": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
    "add_prefix_space that no class reads": {**FAST, "add_prefix_space": True},
    "tokenizer_class": {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True},
}
OF_BERT = {
    "tokenizer_class": "BertTokenizer",
    **{f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
}
BERT: dict[str, dict[str, Any]] = {
    "do_lower_case": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    "strip_accents": {"tokenizer_class": "BertTokenizer", "strip_accents": False},
    "tokenize_chinese_chars": {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False},
    "do_lower_case as it is": {**OF_BERT, "do_lower_case": True, "strip_accents": None},
    "do_lower_case that no class reads": {**FAST, "do_lower_case": False},
    "cls_token": {**OF_BERT, "cls_token": "[MASK]"},
    "sep_token": {**OF_BERT, "sep_token": "[MASK]"},
    "unk_token": {**OF_BERT, "unk_token": "[PAD]"},
    "clean_up_tokenization_spaces": {**FAST, "clean_up_tokenization_spaces": True},
    "split_special_tokens": {**FAST, "split_special_tokens": True, "mask_token": "[MASK]"},
}
LLAMA: dict[str, dict[str, Any]] = {
    "legacy": {"tokenizer_class": "LlamaTokenizer", "legacy": False},
    "legacy is true": {"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    "legacy is absent": {"tokenizer_class": "LlamaTokenizer"},
    "add_prefix_space": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
}


@pytest.mark.parametrize("row", BYTE_LEVEL)
def test_keys_beside_a_vocabulary_of_bytes(row: str, byte_level: str, tmp_path: Path) -> None:
    """Ids, text, special tokens and their flags are those of transformers."""
    assert_as_transformers(folder_with(tmp_path, byte_level, "gpt2", {**FAST, **BYTE_LEVEL[row]}))


def test_a_token_that_fills_texts_up(tmp_path: Path) -> None:
    """The padding token of ``tokenizer.json`` is a special token, unless the settings name one."""
    tokenizer = trained_tokenizer()
    tokenizer.enable_padding(pad_id=400, pad_token="<z>")  # noqa: S106  # no secret
    content = tokenizer.to_str()
    for number, settings in enumerate(({}, {"pad_token": "<y>"})):
        folder = folder_with(tmp_path / str(number), content, "gpt2", {**FAST, **settings})
        assert_as_transformers(folder)


@pytest.mark.parametrize("row", BERT)
def test_keys_beside_a_vocabulary_of_bert(row: str, tmp_path: Path) -> None:
    """Lower case, accents and Chinese characters are as the class reads the settings."""
    assert_as_transformers(folder_with(tmp_path, bert_tokenizer(), "bert", dict(BERT[row])))


@pytest.mark.parametrize("row", LLAMA)
def test_keys_beside_a_vocabulary_of_llama(row: str, tmp_path: Path) -> None:
    """The space before a text is put where the class of transformers puts it."""
    assert_as_transformers(folder_with(tmp_path, llama_tokenizer(), "llama", dict(LLAMA[row])))


OTHER_STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a space before a text": (
        "gpt2",
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        {"tokenizer_class": "GPT2TokenizerFast"},
    ),
    "no composed characters": ("gpt2", {}, {"tokenizer_class": "GPTNeoXTokenizerFast"}),
    "a class that counts always": ("qwen2", {}, FAST),
    "no tokens around": ("roberta", {}, {"tokenizer_class": "RobertaTokenizer"}),
}
OTHER_STEPS_OF_BERT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "capitals": ({"lowercase": False}, {"tokenizer_class": "BertTokenizer"}),
    "capitals and no class": ({"lowercase": False}, {"model_max_length": 16}),
    "accents": ({"strip_accents": False}, {**OF_BERT, "do_lower_case": True}),
    "Chinese characters": ({"handle_chinese_chars": False}, OF_BERT),
    "a second name of the class": ({"lowercase": False}, {"tokenizer_class": "ElectraTokenizer"}),
    "a class without a constructor": ({}, {"tokenizer_class": "DistilBertTokenizerFast"}),
}


@pytest.mark.parametrize("row", OTHER_STEPS)
def test_steps_that_a_class_makes(row: str, byte_level: str, tmp_path: Path) -> None:
    """A class that makes steps of its own takes the vocabulary of ``tokenizer.json`` alone."""
    kind, steps, settings = OTHER_STEPS[row]
    content = json.dumps(json.loads(byte_level) | steps)
    assert_as_transformers(folder_with(tmp_path, content, kind, dict(settings)))


@pytest.mark.parametrize("row", OTHER_STEPS_OF_BERT)
def test_steps_that_a_class_of_bert_makes(row: str, tmp_path: Path) -> None:
    """Lower case, accents and the tokens around a text are those of the class if no setting names them."""
    fields, settings = OTHER_STEPS_OF_BERT[row]
    content = json.loads(bert_tokenizer())
    content["normalizer"] |= fields
    if not fields:
        content["post_processor"] = None
    assert_as_transformers(folder_with(tmp_path, json.dumps(content), "bert", dict(settings)))


def test_steps_that_nobody_could_record(tmp_path: Path) -> None:
    """A class that takes another kind of vocabulary is asked itself: it puts <s> before no text."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0)]
    pieces += [(letter, -2.0) for letter in "thecasonm"]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 3))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    settings = {"tokenizer_class": "PegasusTokenizer"}
    assert_as_transformers(folder_with(tmp_path, backend.to_str(), "pegasus", settings))


def test_a_tokenizer_as_its_class_makes_it_is_read_without_transformers(tmp_path: Path) -> None:
    """The steps in ``tokenizer.json`` are those of the class, so transformers is not asked."""
    rows = {
        "bert": (bert_tokenizer(), {**OF_BERT, "do_lower_case": True}),
        "gpt2": (str(trained_tokenizer().to_str()), {"tokenizer_class": "GPT2TokenizerFast"}),
    }
    for kind, (content, settings) in rows.items():
        folder = folder_with(tmp_path / kind, content, kind, settings)
        assert _from_folder(folder) is not None, kind


def test_a_class_that_decides_on_the_space_before_each_piece(tmp_path: Path) -> None:
    """CodeLlama puts a space before a text and not behind a special token; a gap to fill is refused."""
    row = json.loads(tokenizer_classes.FILE.read_text())["CodeLlamaTokenizer"]
    content = made_by(transformers.CodeLlamaTokenizer, row["tokens"]) or {}
    content["pre_tokenizer"]["prepend_scheme"] = "always"
    settings = {"tokenizer_class": "CodeLlamaTokenizer", "additional_special_tokens": ["<im>"]}
    folder = folder_with(tmp_path, json.dumps(content), "llama", settings)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(Weights(folder, {}))
    assert ours.encode("the<im>cat") == theirs("the<im>cat")["input_ids"]
    with pytest.raises(RequestError, match="the text has '<FILL_ME>', the gap between two parts"):
        ours.encode("the <FILL_ME> cat")


def test_a_folder_without_settings_is_read_as_it_is(tmp_path: Path) -> None:
    """A ``tokenizer.json`` alone has all steps."""
    model = tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "The": 2}, unk_token="[UNK]")  # noqa: S106  # no secret
    tokenizer = tokenizers.Tokenizer(model)
    folder = folder_with(tmp_path, tokenizer.to_str(), "bert", {})
    (folder / "tokenizer_config.json").unlink()
    assert open_tokenizer(Weights(folder, {})).encode("The") == [2]


def made_by(cls: Any, tokens: dict[str, str]) -> dict[str, Any] | None:
    """Return the ``tokenizer.json`` of a class with a small vocabulary, if the class takes one."""
    special = [*dict.fromkeys(tokens.values())]
    letters = sorted(set("thecatTsbxaokm\u2581\u0120<>|[]/_") - set(special))
    words = [*special, *letters, *(f"##{each}" for each in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    scored = [(word, -float(index + 1)) for word, index in vocabulary.items()]
    for arguments in (
        {"vocab": vocabulary, "merges": []},
        {"vocab": vocabulary},
        {"vocab": scored},
    ):
        try:
            made = cls(**arguments)
            made("the cat")
        except Exception:  # noqa: S112  # the class takes another kind of vocabulary
            continue
        content: dict[str, Any] = json.loads(made.backend_tokenizer.to_str())
        return content | {"added_tokens": []}
    return None


ROBERTA_LIKE = {
    "BartTokenizer",
    "BertTokenizer",
    "CamembertTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "FNetTokenizer",
    "GPT2Tokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "MBartTokenizer",
    "MPNetTokenizer",
    "Qwen2Tokenizer",
    "RemBertTokenizer",
    "RobertaTokenizer",
    "XLMRobertaTokenizer",
    "XLNetTokenizer",
}


AT_EACH_CALL = {"SeamlessM4TTokenizer"}
"""Classes that put tokens around a text at each call, by the language that the call names."""


def test_tokens_that_a_class_adds(tmp_path: Path) -> None:
    """If settings leave a special token out, the class of transformers adds it, and so does opgraft.

    The class is the one that the settings name, or for encoders the one of the model's type.
    """
    auto = transformers.models.auto.tokenization_auto
    compared = set()
    for name, row in json.loads(tokenizer_classes.FILE.read_text()).items():
        kind = next(iter(row["kinds"]), "unknown")
        cls = auto.tokenizer_class_from_name(name)
        if cls is None or not issubclass(cls, transformers.PreTrainedTokenizerFast):
            continue
        content = made_by(cls, row["tokens"])
        if content is None or name in AT_EACH_CALL:
            continue
        stated = [{"tokenizer_class": name}, {"tokenizer_class": f"{name}Fast"}]
        if "mask_token" in usual_tokens({}, {"model_type": kind}, of_bytes=False):
            stated.append({})
        for number, settings in enumerate(stated):
            folder = folder_with(tmp_path / f"{name}{number}", json.dumps(content), kind, settings)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_as_transformers(folder)
        compared.add(name)
    assert compared >= ROBERTA_LIKE


def test_the_recorded_classes_are_those_of_transformers() -> None:
    """Each class has a row with its tokens: ``tools/record_tokenizer_classes.py`` writes the file."""
    expected = tokenizer_classes.FILE.read_text()
    assert written(recorded()) == expected


def test_harmless_keys_change_nothing(byte_level: str, tmp_path: Path) -> None:
    """With all keys that are irrelevant, here and in transformers ids and text stay the same."""
    names = {row.name for row in TOKENIZER_CONFIG if row.fate == "irrelevant"}
    special = {
        "padding_side": "left",
        "pad_token_type_id": 1,
        "model_input_names": ["input_ids"],
        "init_inputs": [],
        "add_bos_token": True,
        "add_eos_token": True,
        "processor_class": "P",
        "max_length": 2,
        "truncation_strategy": "longest_first",
        "chat_control_tokens": ["<x>"],
        "response_schema": {},
    }
    ours = {"files_loaded", "local_files_only", "is_local", "_commit_hash", "gguf_file"}
    paths = {name for name in names if name.endswith("_file")} | {"entity_vocab", "backend"}
    usual = names - set(special) - ours - paths
    usual -= {name for name in names if name.endswith("_token") or name.startswith("tokenizer_")}
    settings = {**FAST, **dict.fromkeys(usual, 1), **special}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_transformers(folder_with(tmp_path / "with", byte_level, "gpt2", settings))
    without = folder_with(tmp_path / "without", byte_level, "gpt2", dict(FAST))
    first, second = (open_tokenizer(Weights(each, {})) for each in (tmp_path / "with", without))
    assert [first.encode(text) for text in TEXTS] == [second.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", [row.name for row in TOKENIZER_CONFIG if row.fate == "refused"])
def test_refused_keys_of_a_tokenizer(name: str, byte_level: str, tmp_path: Path) -> None:
    """The error names the file, the key and its value."""
    folder = folder_with(tmp_path, byte_level, "gpt2", {name: "x"})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json .*{name} is 'x'"):
        open_tokenizer(Weights(folder, {}))


def test_code_of_a_checkpoint_is_refused(byte_level: str, tmp_path: Path) -> None:
    """``auto_map`` counts if transformers has no class for the model; then the error says so."""
    settings = {"auto_map": {"AutoTokenizer": ["a.B", None]}, "tokenizer_class": "NoSuchTokenizer"}
    folder = folder_with(tmp_path, byte_level, "no_such_model", settings)
    with pytest.raises(CheckpointError, match=r"needs Python code of its own \(auto_map\)"):
        open_tokenizer(Weights(folder, {}))


NOT_IN_FILES = {"self", "args", "kwargs", "_spm_precompiled_charsmap"}


def test_every_argument_of_a_tokenizer_class_has_a_row() -> None:
    """No class of transformers takes an argument from ``tokenizer_config.json`` that the table leaves out."""
    auto = transformers.models.auto.tokenization_auto
    names = sorted({name for name in auto.TOKENIZER_MAPPING_NAMES.values() if name})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classes = [auto.tokenizer_class_from_name(name) for name in names]
    missing = {
        (cls.__name__, argument)
        for cls in classes
        if cls is not None and "__init__" in vars(cls)
        for argument in inspect.signature(cls.__init__).parameters
        if argument not in NOT_IN_FILES and row_of(TOKENIZER_CONFIG, argument) is None
    }
    assert not missing


def test_every_key_of_sentence_transformers_has_a_row() -> None:
    """All arguments that the module Transformer takes from its file are in the table."""
    modules = pytest.importorskip("sentence_transformers.base.modules.transformer")
    cls = modules.Transformer
    known = {row.name for row in SENTENCE_BERT_CONFIG}
    arguments = set(inspect.signature(cls.__init__.__wrapped__).parameters)
    assert arguments - known == {"self", "model_name_or_path"}
    assert {*cls.config_keys} <= known


def test_every_key_of_gguf_has_a_row() -> None:
    """All keys about text and about the file that the package gguf lists are in the table."""
    keys = [*vars(gguf.Keys.Tokenizer).values(), *vars(gguf.Keys.General).values()]
    keys += vars(gguf.Keys.Split).values() if hasattr(gguf.Keys, "Split") else ()
    texts = {
        key for key in keys if isinstance(key, str) and key.startswith(("tokenizer.", "general."))
    }
    for key in texts:
        row = row_of((*GGUF_TOKENIZER, *GGUF_GENERAL), key)
        assert row is not None, key
        assert row.name != "tokenizer.ggml.*", key


WORDS = "w1 W2 w3 w4 w5 w6 w7 w8 w9"


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder of sentences, as sentence-transformers saves it."""
    folder = Path(tmp_path_factory.mktemp("encoder"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.5}
    model = transformers.BertModel(transformers.BertConfig(**sizes, **layers))
    model.save_pretrained(folder)
    words = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, 40)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {**FAST, "pad_token": "[PAD]", "unk_token": "[UNK]"})
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 32})
    write_modules(folder, "")
    return folder


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def write_modules(folder: Path, path: str) -> None:
    rows = (("Transformer", path), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    write(folder / "modules.json", modules(*rows))


def modules(*rows: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the rows of ``modules.json`` for classes and folders."""
    return [
        {"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, where) in enumerate(rows)
    ]


PROMPTS = {"prompts": {"query": "w30 w31 ", "none": None}}
SENTENCES: dict[str, dict[str, Any]] = {
    "max_seq_length": {
        "sentence_bert_config.json": {"max_seq_length": 6},
        "tokenizer_config.json": {"model_max_length": 9},
    },
    "max_seq_length above the tokenizer's": {
        "sentence_bert_config.json": {"max_seq_length": 8},
        "tokenizer_config.json": {"model_max_length": 5},
    },
    "max_seq_length is null": {
        "sentence_bert_config.json": {"max_seq_length": None},
        "tokenizer_config.json": {"model_max_length": 5},
    },
    "max_len": {
        "sentence_bert_config.json": {"do_lower_case": False},
        "tokenizer_config.json": {"max_len": 4},
    },
    "do_lower_case": {"sentence_bert_config.json": {"do_lower_case": True}},
    "tokenizer_args": {
        "sentence_bert_config.json": {"tokenizer_args": {"model_max_length": 3}},
        "tokenizer_config.json": {"model_max_length": 7},
    },
    "truncation_side": {
        "sentence_bert_config.json": {"max_seq_length": 4},
        "tokenizer_config.json": {"truncation_side": "left"},
    },
    "the name of an older version": {
        "sentence_bert_config.json": None,
        "sentence_roberta_config.json": {"max_seq_length": 3, "do_lower_case": True},
    },
    "query_length": {
        "sentence_bert_config.json": {
            "query_length": 3,
            "document_length": 2,
            "unpad_inputs": False,
        }
    },
    "what version 6 saves": {
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            "module_output_name": "token_embeddings",
            "model_args": {},
            "processing_kwargs": {},
        }
    },
    "default_prompt_name": {
        "config_sentence_transformers.json": {**PROMPTS, "default_prompt_name": "query"}
    },
    "prompts without a default": {"config_sentence_transformers.json": PROMPTS},
    "a prompt without text": {
        "config_sentence_transformers.json": {**PROMPTS, "default_prompt_name": "none"}
    },
    "truncate_dim": {"config_sentence_transformers.json": {"truncate_dim": 7}},
    "similarity_fn_name": {
        "config_sentence_transformers.json": {
            "similarity_fn_name": "dot",
            "model_type": "SentenceTransformer",
            "__version__": {"pytorch": "1.8.1"},
        }
    },
}


def with_files(source: Path, folder: Path, files: dict[str, Any]) -> Path:
    """Copy an encoder, with more settings in its files; a file of None is left out."""
    for file in source.rglob("*"):
        if file.is_file() and files.get(file.name, {}) is not None:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    for name, settings in files.items():
        if settings is None:
            continue
        file = folder / name
        replaced = name.startswith("sentence") or not file.is_file()
        write(file, settings if replaced else {**json.loads(file.read_text()), **settings})
    return folder


def embedded(folder: Path) -> torch.Tensor:
    (output,) = LLM(str(folder), dtype="float32", **{"load.progress": False}).embed(
        [WORDS], truncate=True
    )
    return torch.tensor(output.embedding)


def reference(folder: Path) -> torch.Tensor:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    return torch.tensor(model.encode([WORDS])[0])


@pytest.mark.parametrize("row", SENTENCES)
@pytest.mark.filterwarnings("ignore")
def test_keys_of_an_encoder_of_sentences(row: str, sentence_encoder: Path, tmp_path: Path) -> None:
    """The vector is that of sentence-transformers."""
    folder = with_files(sentence_encoder, tmp_path, SENTENCES[row])
    torch.testing.assert_close(embedded(folder), reference(folder), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_without_a_list_of_modules(sentence_encoder: Path, tmp_path: Path) -> None:
    """Settings of the pooling do not count, as in sentence-transformers; opgraft makes unit vectors."""
    first_token = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    files = {"modules.json": None, "1_Pooling/config.json": first_token}
    folder = with_files(sentence_encoder, tmp_path, files)
    expected = torch.nn.functional.normalize(reference(folder), dim=-1)
    torch.testing.assert_close(embedded(folder), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_model_in_a_folder_of_its_own(sentence_encoder: Path, tmp_path: Path) -> None:
    """Older versions have the model and its settings in a folder that ``modules.json`` names."""
    inner = with_files(sentence_encoder, tmp_path / "0_BERT", SENTENCES["do_lower_case"])
    (inner / "1_Pooling").rename(tmp_path / "1_Pooling")
    (inner / "modules.json").unlink()
    write_modules(tmp_path, "0_BERT")
    general = {**PROMPTS, "default_prompt_name": "query"}
    write(tmp_path / "config_sentence_transformers.json", general)
    torch.testing.assert_close(embedded(tmp_path), reference(tmp_path), rtol=0, atol=1e-5)
    write_modules(tmp_path, "0_Missing")
    with pytest.raises(CheckpointError, match=r"the model is in '0_Missing', which is missing"):
        embedded(tmp_path)
    write_modules(tmp_path, "../0_BERT")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        embedded(tmp_path)


ENCODER, POOLING, UNIT = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "9")
MODULE_LISTS: dict[str, list[dict[str, Any]]] = {
    "no normalization": modules(ENCODER, POOLING),
    "normalization before the pooling": modules(ENCODER, UNIT, POOLING),
    "normalization before and after": modules(ENCODER, UNIT, POOLING, UNIT),
    "normalization twice": modules(ENCODER, POOLING, UNIT, UNIT),
}
NO_VECTOR: dict[str, list[dict[str, Any]]] = {
    "lists Transformer, expected": modules(ENCODER),
    "lists Transformer, Normalize, expected": modules(ENCODER, UNIT),
    "lists Pooling, Transformer, expected": modules(POOLING, ENCODER),
    "lists Pooling, expected": modules(POOLING),
    "lists Normalize, Transformer, Pooling, expected": modules(UNIT, ENCODER, POOLING),
    "lists no module, expected": [],
}
OTHER_VECTORS = {
    "lists Transformer, Pooling, Pooling, expected": modules(ENCODER, POOLING, POOLING),
    "lists Transformer, Transformer, Pooling, expected": modules(ENCODER, ENCODER, POOLING),
    "a module 'my_code.Pooling'": [*modules(ENCODER), {"type": "my_code.Pooling", "path": ""}],
    "a module 'my_code.Transformer'": [{"type": "my_code.Transformer"}, *modules(POOLING)],
    "missing/config.json is missing": modules(ENCODER, ("Pooling", "missing")),
}


@pytest.mark.parametrize("row", MODULE_LISTS)
@pytest.mark.filterwarnings("ignore")
def test_the_order_of_modules(row: str, sentence_encoder: Path, tmp_path: Path) -> None:
    """The vector is that of sentence-transformers, which applies the modules one after the other."""
    folder = with_files(sentence_encoder, tmp_path, {})
    write(folder / "9/config.json", {})
    write(folder / "modules.json", MODULE_LISTS[row])
    torch.testing.assert_close(embedded(folder), reference(folder), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_lists_of_modules_without_a_vector(sentence_encoder: Path, tmp_path: Path) -> None:
    """If sentence-transformers fails with a list of modules, opgraft refuses the list by name."""
    folder = with_files(sentence_encoder, tmp_path, {})
    write(folder / "9/config.json", {})
    for words, rows in NO_VECTOR.items():
        write(folder / "modules.json", rows)
        with pytest.raises((KeyError, TypeError, ValueError, IndexError, AttributeError)):
            reference(folder)
        with pytest.raises(CheckpointError, match=words):
            embedded(folder)
    for words, rows in OTHER_VECTORS.items():
        write(folder / "modules.json", rows)
        with pytest.raises(CheckpointError, match=words):
            embedded(folder)


def test_a_normalization_of_tokens(sentence_encoder: Path, tmp_path: Path) -> None:
    """A Normalize whose file names another tensor is refused with the key."""
    for number, key in enumerate(("module_input_name", "module_output_name")):
        folder = with_files(sentence_encoder, tmp_path / str(number), {})
        write(folder / "2_Normalize/config.json", {key: "token_embeddings"})
        with pytest.raises(CheckpointError, match=rf"2_Normalize/config\.json .*{key}"):
            embedded(folder)


REFUSED = {
    **{name: ("sentence_bert_config.json", {"x": 1}) for name in ("model_args", "config_args")},
    **{name: ("sentence_bert_config.json", {"x": 1}) for name in ("model_kwargs", "config_kwargs")},
    "processing_kwargs": ("sentence_bert_config.json", {"text": {"max_length": 3}}),
    "transformer_task": ("sentence_bert_config.json", "fill-mask"),
    "modality_config": ("sentence_bert_config.json", {"message": {}}),
    "module_output_name": ("sentence_bert_config.json", "scores"),
    "tokenizer_name_or_path": ("sentence_bert_config.json", "elsewhere"),
    "model_type": ("config_sentence_transformers.json", "SparseEncoder"),
    "default_prompt_name": ("config_sentence_transformers.json", "unheard-of"),
    "truncate_dim": ("config_sentence_transformers.json", 0),
    "tokenizer_args": ("sentence_bert_config.json", {"add_prefix_space": True}),
}


def test_refused_keys_of_an_encoder_of_sentences(sentence_encoder: Path, tmp_path: Path) -> None:
    """The error names the file and the key; every refused row of the tables is tried."""
    tables = (*SENTENCE_BERT_CONFIG, *CONFIG_SENTENCE_TRANSFORMERS)
    assert {row.name for row in tables if row.fate == "refused"} <= REFUSED.keys()
    for name, (file, value) in REFUSED.items():
        folder = with_files(sentence_encoder, tmp_path / name, {file: {name: value}})
        with pytest.raises(CheckpointError, match=rf"{file}.*{name}"):
            embedded(folder)


def test_a_prompt_that_is_not_pooled_is_refused(sentence_encoder: Path, tmp_path: Path) -> None:
    """``include_prompt`` of the pooling counts if there is a default prompt."""
    folder = with_files(sentence_encoder, tmp_path, SENTENCES["default_prompt_name"])
    pooling = {"word_embedding_dimension": 32, "include_prompt": False}
    write(folder / "1_Pooling/config.json", pooling)
    with pytest.raises(CheckpointError, match=r"include_prompt is false, .* 'w30 w31 '"):
        embedded(folder)
