"""Tokenizers opened without transformers give the same token ids and text as with it."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from opgraft.errors import CheckpointError
from opgraft.models import Weights, find_checkpoint, open_weights
from opgraft.serving.tokenizer import open_tokenizer

transformers = pytest.importorskip("transformers")

SURROUNDING = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "<repo_name>",
    "[MASK]",
    "[SEP]",
    "</s>",
]
RANGES = [
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x400, 0x4FF),
    (0x5D0, 0x6FF),
    (0x900, 0x97F),
]
RANGES += [
    (0x2000, 0x206F),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xE000, 0xE010),
    (0x1F300, 0x1F6FF),
    (0, 0x1F),
]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of random characters of many scripts, words, numbers, spaces, line breaks and special tokens."""
    pick = random.Random(seed)  # noqa: S311  # no secret

    def piece() -> str:
        kind = pick.randrange(6)
        if kind == 0:
            return pick.choice(SPECIAL)
        if kind == 1:
            return pick.choice([" ", "  ", "\n", "\r\n", "\t", "\n\n "]) * pick.randrange(1, 4)
        if kind == 2:
            return str(pick.randrange(10**6))
        if kind == 3:
            return pick.choice(
                [
                    "the",
                    " cat",
                    " don't",
                    " they're",
                    "WE'VE",
                    " naïve",
                    " 漢字",
                    "été",
                    " def f(x):",
                ]
            )
        low, high = pick.choice(RANGES)
        return "".join(chr(pick.randint(low, high)) for _ in range(pick.randrange(1, 6)))

    return ["", *("".join(piece() for _ in range(pick.randrange(12))) for _ in range(count))]


def assert_same(ours, theirs, texts: list[str]) -> None:
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
        for skip in (True, False):
            options = {"clean_up_tokenization_spaces": False}
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, **options
            )


def test_the_language_model(smollm2, smollm2_of_transformers) -> None:
    """Ids, text, special tokens, size and template of SmolLM2 are those of transformers."""
    theirs = smollm2_of_transformers
    assert_same(smollm2, theirs, random_texts(2000))
    assert smollm2.special_tokens == theirs.special_tokens_map
    assert smollm2.chat_templates == {"default": theirs.chat_template}
    assert smollm2.vocab_size == len(theirs)
    assert smollm2.eos_token_id == theirs.eos_token_id


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # an import raises ImportError
from opgraft.models import open_weights
from opgraft.serving.tokenizer import open_tokenizer
print(open_tokenizer(open_weights("smollm2")).encode("a"))
"""


def test_transformers_is_not_imported(smollm2_weights: Weights) -> None:
    """The tokenizer of SmolLM2 is opened without transformers, whose import takes most of the time."""
    # A new interpreter: a warm one, and this process, have imported modules of opgraft already.
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS]
    environ = {**os.environ, "OPGRAFT_PLUGINS": ""}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "[81]\n"), result.stderr


def test_a_sentence_encoder() -> None:
    """A folder's tokenizer.json gives the ids of transformers, and neither cuts nor fills what it asks to."""
    folder = find_checkpoint("minilm")
    ours = open_tokenizer(Weights(folder, {}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert_same(ours, theirs, random_texts(500))
    assert len(ours.encode("word " * 600)) == 602


@pytest.fixture
def folder(trained, tmp_path: Path) -> Path:
    """A checkpoint's tokenizer as transformers saves it."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, **SURROUNDING, additional_special_tokens=["<|im_start|>"]
    )
    fast.add_tokens(["<think>"])
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def change_settings(folder: Path, **values: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": False},
        {"mask_token": "[MASK]"},
        {"added_tokens_decoder": {"500": {"content": "[SEP]", "special": True}}},
        {"eos_token": {"content": "</s>", "__type": "AddedToken"}},
    ],
)
def test_a_saved_tokenizer(folder: Path, values: dict[str, object]) -> None:
    """Tokens that the settings add are as in transformers, and tokenizer.json says what is put around a text."""
    change_settings(folder, **values)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(Weights(folder, {}))
    assert_same(ours, theirs, random_texts(200))
    assert ours.special_tokens == {
        k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)
    }
    assert ours.eos_token_id == theirs.eos_token_id


def test_templates_of_a_folder(folder: Path) -> None:
    """A file goes before the settings, and there may be several by name."""
    assert open_tokenizer(Weights(folder, {})).chat_templates == {"default": "{{ messages }}"}
    (folder / "chat_template.jinja").unlink()
    change_settings(folder, chat_template="a")
    assert open_tokenizer(Weights(folder, {})).chat_templates == {"default": "a"}
    change_settings(
        folder,
        chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    )
    assert open_tokenizer(Weights(folder, {})).chat_templates == {"default": "a", "tool_use": "b"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert open_tokenizer(Weights(folder, {})).chat_templates == {"rag": "r"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer.json",
            "{}",
            r"tokenizer\.json, or what lies beside it, is no tokenizer .*Save it again",
        ),
        ("tokenizer_config.json", "[]", "holds a list, expected a JSON object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": 3}',
            "is no tokenizer that can be read: TypeError",
        ),
        ("chat_template.jinja", b"\xff", "is no tokenizer that can be read: UnicodeDecodeError"),
    ],
)
def test_damaged_files(folder: Path, name: str, content: str | bytes, message: str) -> None:
    """Damaged files are errors that say which."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(Weights(folder, {}))


def test_long_texts_let_other_threads_run() -> None:
    """Token ids and text of long inputs are those of short ones, and meanwhile other threads go on."""
    tokenizer = open_tokenizer(open_weights("smollm2"))
    line = "hello there, world\n"
    text, ids = line * 20_000, tokenizer.encode(line) * 20_000
    ticks: list[float] = []

    def tick() -> None:
        while not done.wait(0.002):
            ticks.append(time.perf_counter())

    done, ticking = threading.Event(), threading.Thread(target=tick)
    ticking.start()
    started = time.perf_counter()
    assert tokenizer.encode(text) == ids
    done.set()
    ticking.join()
    longest = max(later - earlier for earlier, later in itertools.pairwise([started, *ticks]))
    assert longest < (time.perf_counter() - started) / 2
    assert tokenizer.decode(ids) == text
