"""Each interface writes chats through the library of the model's family, and tells the parts of answers apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opgraft.cli.answer import show_stream
from opgraft.cli.chat import Chat
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import ConfigError
from opgraft.serving.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN
from opgraft.serving.llm import LLM
from opgraft.serving.mistral import MistralFormat
from support.chat_libraries import (
    MARKERS_OF_MISTRAL,
    SPECIAL,
    THOUGHT,
    WEATHER,
    WORDS,
    harmony_folder,
    saying,
    write_gpt_oss,
    write_mistral,
)
from support.servers import Server, error_of, serving

USER = {"role": "user", "content": "Is it warm?"}
FUNCTION = WEATHER["function"]
OF_RESPONSES = {"type": "function", **FUNCTION}
OF_MESSAGES = {
    "name": "weather",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


@pytest.fixture(scope="module")
def mistral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mistral_common")
    return write_mistral(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def mistral(mistral_folder: Path) -> Iterator[Server]:
    with serving(mistral_folder) as running:
        yield running


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("openai_harmony")
    vocabulary = harmony_folder()
    folder = write_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))
    with serving(folder, "--model.vocabulary_folder", str(vocabulary)) as running:
        yield running


def of_mistral(*texts: str) -> list[int]:
    markers = [*MARKERS_OF_MISTRAL, *THOUGHT]
    return [
        markers.index(text) if text in markers else SPECIAL + 256 + WORDS.index(text)
        for text in texts
    ]


def of_harmony(*parts: int | str) -> list[int]:
    """Return token ids, each text as one or several tokens of the vocabulary."""
    import openai_harmony

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIKTOKEN_ENCODINGS_BASE", str(harmony_folder()))
        encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")
    tokens = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else encoding.encode(part)
    return tokens


def events(text: str) -> list[dict[str, Any]]:
    lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


def joined(deltas: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


def expect_answer(server: Server, said: dict[str, Any], why: str, so: str, **form: Any) -> None:
    """All interfaces tell the reasoning and the text of an answer, whole and in a stream."""
    body = {"messages": [USER], "max_tokens": 60, **said}
    given = {**body, **({"response_format": form["chat"]} if form else {})}
    message = server.chat(**given).json()["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (why, so)
    chunks = events(server.chat(**given, stream=True).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert joined(deltas, "reasoning_content") == why
    assert joined(deltas, "content") == so

    given = {"input": [USER], "max_output_tokens": 60, **said}
    given |= {"text": {"format": form["responses"]}} if form else {}
    output = server.post("/v1/responses", **given).json()["output"]
    assert [item["content"][0]["text"] for item in output] == [part for part in (why, so) if part]
    news = events(server.post("/v1/responses", **given, stream=True).text)
    deltas = [each for each in news if each["type"] == "response.output_text.delta"]
    assert joined(deltas, "delta") == so

    given = {**body, **({"output_config": {"format": form["messages"]}} if form else {})}
    content = server.post("/v1/messages", **given).json()["content"]
    assert [block.get("thinking") or block["text"] for block in content] == [
        part for part in (why, so) if part
    ]


def expect_call(server: Server, said: dict[str, Any], **options: Any) -> None:
    """All interfaces tell a call, whole and in a stream."""
    body = {"messages": [USER], "max_tokens": 60, **said}
    choice = server.chat(**body, tools=[WEATHER], **options).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    chunks = events(server.chat(**body, tools=[WEATHER], **options, stream=True).text)
    news = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [each["function"]["name"] for each in news if "id" in each] == ["weather"]
    written = joined([each["function"] for each in news], "arguments")
    assert written == call["function"]["arguments"]
    assert joined([chunk["choices"][0]["delta"] for chunk in chunks], "content") == ""

    given = {"input": [USER], "max_output_tokens": 60, **said, "tools": [OF_RESPONSES]}
    (item,) = server.post("/v1/responses", **given).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "weather")
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    answer = server.post("/v1/messages", **body, tools=[OF_MESSAGES]).json()
    (block,) = answer["content"]
    assert (answer["stop_reason"], block["input"]) == ("tool_use", {"city": "Rome"})


def test_answers_of_mistral(mistral: Server) -> None:
    """Reasoning stands between the markers of Mistral's models."""
    said = saying(of_mistral("[THINK]", "why", "[/THINK]", "so it is", "</s>"))
    expect_answer(mistral, said, "why", "so it is")


def test_calls_of_mistral(mistral: Server) -> None:
    """A call has the markers of the version."""
    called = of_mistral("[TOOL_CALLS]", "weather", "[ARGS]", '{"city": "', "Rome", '"}', "</s>")
    expect_call(mistral, saying(called))


def test_prompts_of_mistral(mistral: Server, mistral_folder: Path) -> None:
    """Every interface counts the tokens that the library makes."""
    expected = MistralFormat(mistral_folder / "tekken.json").render([USER], tools=[WEATHER])
    shown = mistral.post("/tokenize", messages=[USER], tools=[WEATHER]).json()
    assert shown["tokens"] == expected
    body = {"messages": [USER], "tools": [OF_MESSAGES]}
    counted = mistral.post("/v1/messages/count_tokens", **body).json()
    assert counted == {"input_tokens": len(expected)}
    used = mistral.chat(messages=[USER], tools=[WEATHER]).json()["usage"]["prompt_tokens"]
    assert used == len(expected)


def test_refused_messages(mistral: Server) -> None:
    """The reason of the library is an error of the request, and long texts are refused before."""
    answer = mistral.chat(messages=[USER, {"role": "assistant", "content": "x"}])
    assert answer.status_code == 400
    assert "mistral-common cannot write these 2 messages" in error_of(answer)["message"]
    long = {"role": "user", "content": "x" * 40_000}
    function = {**FUNCTION, "description": "x" * 40_000}
    named = {**FUNCTION, "parameters": {"type": "object", "properties": {"x" * 40_000: {}}}}
    for body in (
        {"messages": [long]},
        {"tools": [{**WEATHER, "function": function}]},
        {"tools": [{**WEATHER, "function": named}]},
        {"chat_template_kwargs": {"model_identity": "x" * 40_000}},
    ):
        answer = mistral.chat(**body)
        assert error_of(answer)["code"] == "context_length_exceeded"


def test_answers_of_gpt_oss(gpt_oss: Server) -> None:
    """The final message is the text."""
    said = saying(of_harmony(CHANNEL, "final", MESSAGE, "So it is", RETURN))
    expect_answer(gpt_oss, said, "", "So it is")


def test_thoughts_of_gpt_oss(gpt_oss: Server) -> None:
    """The model thinks before an answer of a form: the form is that of the final message."""
    schema = {"enum": ["so"]}
    chat = {"type": "json_schema", "json_schema": {"name": "so", "schema": schema}}
    other = {"type": "json_schema", "name": "so", "schema": schema}
    # The first message is an analysis, as its letter comes first; then a penalty holds the letter back.
    said = saying(of_harmony("why", END, "a", "f"))
    forms = {
        "chat": chat,
        "responses": other,
        "messages": {"type": "json_schema", "schema": schema},
    }
    expect_answer(gpt_oss, said, "why", '"so"', **forms)


def test_calls_of_gpt_oss(gpt_oss: Server) -> None:
    """A message to a function is a call."""
    called = of_harmony(
        *(CHANNEL, "commentary to=functions.weather ", CONSTRAIN, "json", MESSAGE),
        *('{"city": "Rome"}', CALL),
    )
    expect_call(gpt_oss, saying(called))


def test_a_forced_call_of_gpt_oss(gpt_oss: Server) -> None:
    """A grammar with the markers of a call forces it, and a cut one stays a call."""
    body = {"messages": [USER], "tools": [WEATHER], "tool_choice": "required"}
    said = saying(of_harmony("c", "R", "o", "m", "e", '"'))
    choice = gpt_oss.chat(**body, **said, max_tokens=90).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    choice = gpt_oss.chat(**body, **said, max_tokens=3).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", "")
    assert choice["finish_reason"] == "length"


def test_prompts_of_gpt_oss(gpt_oss: Server) -> None:
    """Every interface counts the tokens that the library makes, and the effort reaches the prompt."""
    shown = gpt_oss.post("/tokenize", messages=[USER]).json()
    assert shown["tokens"][-2:] == of_harmony(200_006, "assistant")
    counted = gpt_oss.post("/v1/messages/count_tokens", messages=[USER]).json()
    assert counted == {"input_tokens": shown["count"]}
    answers = [gpt_oss.chat(messages=[USER], reasoning_effort=effort) for effort in ("low", "big")]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[0].json()["usage"]["prompt_tokens"] == shown["count"]


def test_a_setting_that_cannot_be_met(mistral_folder: Path) -> None:
    """The model does not start, and the error names the setting."""
    settings = {"chat_format": "harmony", "vocabulary_folder": str(harmony_folder())}
    with pytest.raises(ConfigError, match=r"model\.chat_format is harmony, and the tokenizer in"):
        LLM(str(mistral_folder), **{f"model.{name}": value for name, value in settings.items()})


def test_a_chat_in_a_terminal(mistral_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``opgraft chat`` shows no thought, and the next turn has none."""
    said = saying(of_mistral("[THINK]", "why", "[/THINK]", "so it is", "</s>"))
    biases = {int(token): bias for token, bias in said.pop("logit_bias").items()}
    params = SamplingParams(**said, logit_bias=biases, max_tokens=60)
    chat = Chat(LLM(str(mistral_folder)), params, None, show_stream)
    chat.answer("Is it warm?")
    assert chat.messages == [USER, {"role": "assistant", "content": "so it is"}]
    assert capsys.readouterr().out == "so it is\n"


def test_a_cut_chat(mistral: Server) -> None:
    """The last token ids of a chat are kept. A chat with too many characters is refused before."""
    asked = [{"role": "user", "content": "so it is" * 20}]
    answer = mistral.chat(messages=asked, truncate_prompt_tokens=9).json()
    assert answer["usage"]["prompt_tokens"] == 9
    long = [{"role": "user", "content": "x" * 300_000}]
    answer = mistral.chat(messages=long, truncate_prompt_tokens=9)
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert "a library makes token ids of whole chats" in error_of(answer)["message"]
