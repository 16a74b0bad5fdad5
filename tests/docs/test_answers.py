"""The page on requests and answers says what the code has, and what differs from vLLM as it does."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import opgraft
import pytest
from docs.test_reference import code, rows_of
from opgraft import LLM, AsyncLLM, CompilationConfig, SamplingParams
from opgraft.errors import ConfigError, RequestError
from opgraft.serving.engine_settings import engine_config


def documented(header: str) -> list[str]:
    """The code spans in the first cells of the rows of a table."""
    return [span for row in rows_of("answers", header) for span in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize(
    "name", ["RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics", "EmbeddingOutput"]
)
def test_every_field_of_an_answer_is_a_row(name: str) -> None:
    """Fields, and properties of times, in their order."""
    cls = getattr(opgraft, name)
    properties = [each for each, value in vars(cls).items() if isinstance(value, property)]
    public = [field.name for field in dataclasses.fields(cls)]
    times = properties if name == "RequestMetrics" else []
    assert sorted(documented(f"`{name}`")) == sorted([*public, *times])


def test_methods_are_awaited_as_listed() -> None:
    """Each public method of AsyncLLM is in the table, under how it is used."""
    found: dict[str, list[str]] = {"async for": [], "await": [], "called": []}
    for name, method in inspect.getmembers(AsyncLLM, inspect.isfunction):
        if not name.startswith("_"):
            streams = "AsyncGenerator" in str(inspect.signature(method).return_annotation)
            how = (
                "async for"
                if streams
                else "await"
                if inspect.iscoroutinefunction(method)
                else "called"
            )
            found[how].append(name)
    rows = {
        row[0].strip("`"): sorted(re.findall(r"`([^`]+)`", row[1]))
        for row in rows_of("answers", "how")
    }
    assert rows == {
        next(each for each in rows if each.startswith(how)): sorted(names)
        for how, names in found.items()
    }


def refuses(message: str, **values: object) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)  # type: ignore[arg-type]


def refuses_setting(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config("smollm2", None, {name: 0.5})


def compilation_of(**settings: object) -> CompilationConfig:
    return engine_config("smollm2", None, settings).compilation_config


def expect(holds: bool) -> None:
    assert holds


def parameters(method: Callable[..., object]) -> list[str]:
    return list(inspect.signature(method).parameters)


DIFFERENCES: Mapping[str, Callable[[], None]] = {
    "SamplingParams(top_k=-1)": lambda: expect(SamplingParams(top_k=-1) == SamplingParams(top_k=0)),
    "SamplingParams(structured_outputs=…)": lambda: expect(
        SamplingParams(structured_outputs=SimpleNamespace(regex="a")).structured_output
        == {"regex": "a"}
    ),
    "SamplingParams(logprobs=-1)": lambda: expect(
        (SamplingParams(logprobs=-1).logprobs or 0) > 1 << 40
    ),
    "SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, seed=-1)": (
        lambda: expect(
            SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, seed=-1)
            == SamplingParams()
        )
    ),
    "SamplingParams(temperature=1e-6)": lambda: expect(SamplingParams(temperature=1e-6).greedy),
    "SamplingParams(max_tokens=None)": lambda: expect(
        SamplingParams(max_tokens=None).most_tokens > 1 << 40
    ),
    "SamplingParams(allowed_token_ids=…)": lambda: expect(
        SamplingParams(allowed_token_ids=[1]).allowed_token_ids == (1,)
    ),
    "SamplingParams(presence_penalty=3)": lambda: refuses("from -2 to 2", presence_penalty=3),
    "SamplingParams(n=2, temperature=0)": lambda: refuses(
        "same output every time", n=2, temperature=0
    ),
    "LLM.generate(sampling_params=…)": lambda: expect(
        parameters(LLM.generate)[2] == "sampling_params"
    ),
    "LLM.generate(use_tqdm=…)": lambda: expect(
        all(
            {"progress", "use_tqdm"} <= {*parameters(method)}
            for method in (LLM.generate, LLM.chat, LLM.embed)
        )
    ),
    "LLM.chat(add_generation_prompt=…, chat_template=…, chat_template_kwargs=…)": lambda: expect(
        {"add_generation_prompt", "chat_template", "chat_template_kwargs"}
        <= {*parameters(LLM.chat)}
    ),
    "LLM.chat(continue_final_message=…)": lambda: expect(
        "continue_final_message" in parameters(LLM.chat)
    ),
    "LLM.get_default_sampling_params()": lambda: expect(
        parameters(LLM.get_default_sampling_params) == ["self"]
    ),
    "LLM.get_tokenizer()": lambda: expect(parameters(LLM.get_tokenizer) == ["self"]),
    'LLM(runner="pooling")': lambda: expect("runner" in parameters(LLM)),
    "LLM.embed(…)[0].outputs.embedding": lambda: expect(
        opgraft.EmbeddingOutput("0", None, [1], [2.0]).outputs.embedding == [2.0]
    ),
    "LLM.generate(priority=[…])": lambda: expect("priority" in parameters(LLM.generate)),
    "LLM(gpu_memory_utilization=…)": lambda: refuses_setting(
        "gpu_memory_utilization", r"cache\.memory_share"
    ),
    "LLM(enforce_eager=True)": lambda: expect(compilation_of(enforce_eager=True).level == 0),
    "LLM(compilation_config=…)": lambda: expect(
        compilation_of(compilation_config={"level": 2}).level == 2
    ),
    "LLM(swap_space=…)": lambda: refuses_setting("swap_space", "LLM has no argument 'swap_space'"),
    "LLM.embed(truncate_prompt_tokens=…)": lambda: expect("truncate" in parameters(LLM.embed)),
    "RequestOutput.metrics": lambda: expect(hasattr(opgraft.RequestMetrics, "time_to_first_token")),
}
"""By row of the table: a check of what it says."""


def test_every_difference_is_checked() -> None:
    """The table has no row that nothing below looks at."""
    assert [code(row[0]) for row in rows_of("answers", "vLLM")] == list(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_from_vllm(name: str) -> None:
    """The code does what the row says."""
    DIFFERENCES[name]()
