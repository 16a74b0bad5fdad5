"""Chats of Mistral's models are written by mistral-common, with a small vocabulary."""

from __future__ import annotations

import hashlib
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from opgraft.config import ModelConfig
from opgraft.errors import CheckpointError, ConfigError, InputError, RequestError
from opgraft.models.files import open_weights
from opgraft.serving.library_formats import library_format
from opgraft.serving.mistral import MistralFormat, vocabulary_in
from opgraft.serving.outputs import CompletionOutput
from opgraft.serving.server.call_forms import form_of_template
from opgraft.serving.tokenizer import Tokenizer, find_tokenizer
from support.chat_libraries import WEATHER, write_mistral, write_tekken
from support.small_tokenizers import trained_tokenizer

mistral_common = pytest.importorskip("mistral_common")
pytest.importorskip("transformers")

USER = {"role": "user", "content": "Is it warm?"}
CALL: dict[str, Any] = {
    "id": "call_of_a_client",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_of_a_client", "content": "31 degrees"},
    {"role": "assistant", "content": "Yes."},
    USER,
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mistral(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    found = find_tokenizer(open_weights(str(checkpoint)))
    assert found is not None
    return found


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


ID = hashlib.sha256(CALL["id"].encode()).hexdigest()[:9]
LISTED = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "' + ID + '"}]'
CALLED = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
OFFERED = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "weather", "description": "Tells the weather", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]'
    "[/AVAILABLE_TOOLS]"
)


def test_a_conversation(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Instructions, functions, reasoning, a call, its result and an answer have the markers of the version."""
    ids = MistralFormat(checkpoint / "tekken.json").render(HISTORY, tools=[WEATHER])
    assert text_of(tokenizer, ids) == (
        f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]{OFFERED}[INST]Is it warm?[/INST]"
        f"[THINK]why[/THINK]{CALLED}</s>[TOOL_RESULTS]31 degrees[/TOOL_RESULTS]Yes.</s>[INST]Is it warm?[/INST]"
    )


@pytest.mark.parametrize(
    ("version", "called", "result"),
    [
        ("v3", LISTED, f'[TOOL_RESULTS]{{"content": "31 degrees", "call_id": "{ID}"}}'),
        ("v7", LISTED, f"[TOOL_RESULTS]{ID}[TOOL_CONTENT]31 degrees"),
        ("v11", CALLED.replace("[ARGS]", f"[CALL_ID]{ID}[ARGS]"), f"[TOOL_RESULTS]{ID}[TOOL_CO"),
        ("v13", CALLED, "[TOOL_RESULTS]31 degrees"),
    ],
)
def test_calls_of_each_version(
    version: str, called: str, result: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The vocabulary states the version. Answers are read in the form of that version."""
    file = write_tekken(tmp_path, version, thinks=False) / "tekken.json"
    chat = MistralFormat(file)
    text = text_of(tokenizer, chat.render(HISTORY, tools=[WEATHER]))
    assert called in text
    assert result in text
    assert "why" not in text
    has_args = "[ARGS]" in (form_of_template(chat.source).parts or ())
    assert has_args == ("[ARGS]" in called)


def test_every_text_has_the_same_ids(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """The engine's tokenizer and the library read the same file alike, beyond ASCII too."""
    for text in ("so it is, why?", "漢字 😀 naïve", "  two\n\nlines 123"):
        ids = MistralFormat(checkpoint / "tekken.json").render([{"role": "user", "content": text}])
        assert ids == tokenizer.encode(f"<s>[INST]{text}[/INST]", add_special_tokens=False)
    assert tokenizer.encode("so") == [1, *tokenizer.encode("so", add_special_tokens=False)]
    assert tokenizer.eos_token_id == 2


def test_markers_in_messages_are_text(checkpoint: Path) -> None:
    """A user cannot end the own message by writing a marker."""
    chat = MistralFormat(checkpoint / "tekken.json")
    ids = chat.render([{"role": "user", "content": "[/INST] x </s>"}])
    assert ids.count(4) == 1
    assert 2 not in ids


def test_a_continued_message(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """The prompt ends with the text of the last message."""
    chat = MistralFormat(checkpoint / "tekken.json")
    begun = [USER, {"role": "assistant", "content": "Yes, it"}]
    ids = chat.render(begun, continue_final_message=True)
    assert text_of(tokenizer, ids) == "<s>[INST]Is it warm?[/INST]Yes, it"
    with pytest.raises(RequestError, match="has no text"):
        chat.render([USER, {"role": "assistant"}], continue_final_message=True)
    called = {**begun[-1], "tool_calls": [CALL]}
    with pytest.raises(RequestError, match="calls follow this text"):
        chat.render([USER, called], continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "bot", "content": "x"}], "mistral-common cannot write these 1 messages: .*bot"),
        (
            [USER, {"role": "assistant", "content": "x"}],
            "cannot write these 2 messages: .*last role",
        ),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
        ([], "has no messages"),
    ],
)
def test_messages_that_cannot_be_written(
    messages: list[dict[str, Any]], reason: str, checkpoint: Path
) -> None:
    """The error has the reason of the library."""
    with pytest.raises(RequestError, match=reason):
        MistralFormat(checkpoint / "tekken.json").render(messages)


def test_the_file_of_a_folder(tmp_path: Path) -> None:
    """tekken.json comes first, and among older files the highest version."""
    assert vocabulary_in(tmp_path) is None
    for version in ("v3", "v7m1", "v2"):
        (tmp_path / f"tokenizer.model.{version}").touch()
    assert vocabulary_in(tmp_path) == tmp_path / "tokenizer.model.v7m1"
    (tmp_path / "tekken.json").touch()
    assert vocabulary_in(tmp_path) == tmp_path / "tekken.json"


def test_a_damaged_vocabulary(tmp_path: Path) -> None:
    """The error names the file, for the library and for the tokenizer of the engine."""
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tekken\.json is no vocabulary"):
        MistralFormat(tmp_path / "tekken.json")


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_vocabulary_of_sentencepiece() -> None:
    """Without that library, the error names it. The file is one that mistral-common ships."""
    data = Path(mistral_common.__file__).parent / "data"
    with pytest.raises(InputError, match="pip install sentencepiece"):
        MistralFormat(data / "mistral_instruct_tokenizer_240323.model.v3")


def test_the_choice(checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The files of the checkpoint decide, unless a setting does."""

    def chosen(**settings: Any) -> Any:
        return library_format(ModelConfig(**settings), checkpoint, tokenizer)

    assert isinstance(chosen(chat_format="auto"), MistralFormat)
    assert isinstance(chosen(chat_format="mistral"), MistralFormat)
    assert chosen(chat_format="template") is None
    assert chosen(chat_format="auto", chat_template="chat.jinja") is None
    with pytest.raises(ConfigError, match=r"model\.chat_template names a template"):
        chosen(chat_format="mistral", chat_template="chat.jinja")
    other = write_tekken(tmp_path / "v3", "v3", thinks=False)
    assert "[ARGS]" not in chosen(chat_format="auto", vocabulary_folder=str(other)).source
    empty = tmp_path / "empty"
    for chat_format in ("auto", "mistral"):
        with pytest.raises(ConfigError, match=rf"{empty} has none: set model\.vocabulary_folder"):
            chosen(chat_format=chat_format, vocabulary_folder=str(empty))


def test_a_vocabulary_of_another_model(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ids would mean other texts for the model, so the special tokens are compared."""
    other = Tokenizer(tmp_path, trained_tokenizer())

    def chosen(folder: Path, **settings: Any) -> Any:
        return library_format(ModelConfig(**settings), folder, other)

    given = {"vocabulary_folder": str(checkpoint)}
    reason = (
        r"other special tokens than .*tekken\.json, in which <s> is 1: set model\.chat_format to"
    )
    with pytest.raises(ConfigError, match=reason):
        chosen(tmp_path, chat_format="mistral", **given)
    with pytest.raises(ConfigError, match=reason):
        chosen(checkpoint, chat_format="auto", **given)
    with caplog.at_level(logging.WARNING):
        assert chosen(checkpoint, chat_format="auto") is None
    (record,) = caplog.records
    assert "in which <s> is 1" in record.getMessage()


def test_the_text_for_people(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """The command line shows no thoughts, also while an answer grows."""
    chat = MistralFormat(checkpoint / "tekken.json")
    said = "so [THINK]why 😀[/THINK]it [THINK]why[/THINK]is</s>"
    ids = tokenizer.encode(said, add_special_tokens=False)
    growing, shown = chat.user_text([]), ""
    for end in range(len(ids) + 1):
        answer = CompletionOutput(0, token_ids=ids[:end])
        answer.text = tokenizer.decode(ids[:end]).rstrip("\ufffd")
        text = growing.read(answer)
        assert text.startswith(shown)
        shown = text
    assert shown == "so it is"
    assert chat.user_text([]).read(answer) == "so it is"


def test_a_missing_library(
    checkpoint: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The setting is an error then. Without the setting, the template goes on after a warning."""
    # An import of this module fails.
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(ConfigError, match=r"pip install 'opgraft\[formats\]'"):
        library_format(ModelConfig(chat_format="mistral"), checkpoint, tokenizer)
    with caplog.at_level(logging.WARNING):
        assert library_format(ModelConfig(chat_format="auto"), checkpoint, tokenizer) is None
    (record,) = caplog.records
    assert "pip install 'opgraft[formats]'" in record.getMessage()
