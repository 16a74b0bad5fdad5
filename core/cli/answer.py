"""The answers of ``opgraft run MODEL PROMPT…``.

A single answer is shown while it grows. Several answers are computed together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import click
import torch
from opgraft.base.text import printable
from opgraft.binding.idle_plugins import idle_plugins
from opgraft.cli.answers import answers
from opgraft.cli.comparison import Measurement, ModelComparison, timed
from opgraft.cli.output import AlreadyTold, discard_stdout, echo, print_json, print_table
from opgraft.engine.planning.splits import expect_split
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.serving.chat_format import UserText, WholeText
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.interrupts import Interrupts
from opgraft.serving.llm import LLM, Interrupted
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine


def open_llm(model: str, on_step: OnStep | None = None) -> LLM:
    """Load a model, and print the size of its cache, if any, on stderr."""
    # A split that cannot fit is refused before minutes are spent on loading.
    expect_split(engine_config(model, None, {}).resolved())
    llm = LLM(model, on_step=on_step)
    if not llm.embeds:
        click.echo(llm.capacity(), err=True)
    return llm


def show_idle_plugins() -> None:
    """Print a line on stderr for each active plugin without a kernel for this process."""
    for idle in idle_plugins():
        click.echo(str(idle), err=True)


def measure_answers(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Measurement:
    """Answer prompts and measure the time, without the preparations of the first call.

    Raises:
        RequestError: a prompt cannot be answered.
        Interrupted: after an interrupt.
    """
    logits: dict[str, torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], values: torch.Tensor) -> torch.Tensor:
        logits[str(prompt)] = values.float().cpu()
        return values

    # The first call prepares kernels and memory, so its time does not count.
    first_token = replace(params, max_tokens=1, logits_processors=(keep,))
    first = asked(llm, prompts, first_token)
    outputs, seconds = timed(lambda: asked(llm, prompts, params))
    expect_answers(llm, outputs)
    numbers = torch.stack([logits[str(output.prompt_token_ids)] for output in first])
    answers = [output.outputs[0].token_ids for output in outputs]
    return Measurement(numbers, answers, _tokens(outputs), seconds)


def answer_prompts(
    llm: LLM,
    model: str,
    prompts: Sequence[str],
    params: SamplingParams,
    as_json: bool,
    comparison: ModelComparison | None = None,
) -> None:
    """Answer prompts and print the answers. The time goes to stderr.

    If the model has a chat template, a prompt becomes the first message of a chat.

    Raises:
        RequestError: a prompt cannot be answered.
        AlreadyTold: likewise, and the printed JSON has the reason.
        Abort: after an interrupt, and after the answers so far are printed.
    """
    start = time.perf_counter()
    # People see a single answer while it grows.
    if len(prompts) == 1 and not as_json:
        outputs = [_streamed(llm, prompts[0], params)]
    else:
        outputs = _at_once(llm, prompts, params)
    seconds = time.perf_counter() - start
    # JSON is one object: the answers, or the error if there are none.
    if as_json and not _tokens(outputs):
        expect_answers(llm, outputs)
    if as_json:
        _print_as_json(llm, model, prompts, outputs, seconds, comparison)
    elif len(prompts) > 1:
        _print_as_text(llm, prompts, outputs)
        print_kernels(llm)
    if comparison and not as_json:
        echo()
        comparison.print()
    # If every request has failed, there are no tokens.
    if not as_json and _tokens(outputs):
        click.echo(_speed(outputs, seconds), err=True)
    if any(output.outputs[0].finish_reason == "abort" for output in outputs):
        raise click.Abort
    # Last, so that the answers of other prompts are printed before.
    try:
        expect_answers(llm, outputs)
    except Exception as error:
        if as_json:
            raise AlreadyTold from error
        raise


def _streamed(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    chats = llm.chats
    inputs = llm.engine.inputs
    given = inputs.render_chat([_message(prompt)]) if chats else prompt
    request = inputs.prepare("0", given, params, add_special_tokens=not chats)
    return show_stream(llm, request)


def _at_once(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
    try:
        return asked(llm, prompts, params)
    except Interrupted as interrupted:
        return interrupted.outputs


def asked(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
    """Return the answers to prompts, as messages of chats if the model has a chat template.

    Raises:
        RequestError: a prompt cannot be answered.
        Interrupted: after an interrupt.
    """
    if llm.chats:
        return llm.chat([[_message(prompt)] for prompt in prompts], params)
    return llm.generate(prompts, params)


def expect_answers(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """Check that no answer has failed.

    Raises:
        Exception: raised by a plugin's kernel in a step.
        RequestError: answers have failed for another reason.
    """
    answers = [output.outputs[0] for output in outputs]
    failed = [str(answer.error) for answer in answers if answer.finish_reason == "error"]
    if not failed:
        return
    for replica in llm.replicas.each:
        engine = replica.engine
        # The error itself, so that the command line can name the plugin.
        if isinstance(engine, TextEngine) and engine.core.step_failure is not None:
            raise engine.core.step_failure
    raise RequestError(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")


def _message(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def user_text(llm: LLM, prompt: Sequence[int]) -> UserText:
    """Return a reader of the answer to a prompt, for people: without the reasoning."""
    return llm.engine.inputs.chat_format.user_text(prompt) if llm.chats else WholeText()


def shown_text(llm: LLM, output: RequestOutput, index: int = 0) -> str:
    """Return the text of an answer for people."""
    return user_text(llm, output.prompt_token_ids).read(output.outputs[index])


def show_stream(llm: LLM, request: OpenRequest) -> RequestOutput:
    """Show an answer on stdout while it grows, with a line break at the end.

    An interrupt ends the answer.

    Args:
        llm: computes the answer.
        request: for one answer.

    Returns:
        The answer so far.
    """
    shown = 0
    reader = user_text(llm, request.output.prompt_token_ids)
    interrupts = Interrupts()
    with (
        interrupts.awaited(),
        closing(llm.answers([request], grows=True, interrupts=interrupts)) as news,
        suppress(Interrupted),
    ):
        for output in news:
            text = reader.read(output.outputs[0])
            # Only the new text.
            _show(text[shown:])
            shown = len(text)
    text = reader.read(request.output.outputs[0])
    if text or request.output.outputs[0].error is None:
        _show(f"{text[shown:]}\n")
    return request.output


def _show(piece: str) -> None:
    """Write a part of an answer to stdout. Terminal sequences are escaped, line breaks kept."""
    try:
        click.echo(_harmless(piece), nl=False, file=answers())
    except BrokenPipeError:
        discard_stdout()


def _harmless(text: str) -> str:
    # A model may write sequences that a terminal obeys.
    return "\n".join(map(printable, text.split("\n")))


def _print_as_text(llm: LLM, prompts: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        echo(f"> {printable(prompt)}\n{_harmless(shown_text(llm, output))}\n")


def print_kernels(llm: LLM) -> None:
    """Print the kernel and provider of each op, with counts, and remarks of the engine's parts."""
    explained = llm.explain()
    ops: Counter[tuple[str, str]] = Counter()
    for row in explained.rows:
        if row.runs:
            ops[row.op or row.op_class, f"{row.kernel} of {row.provider}"] += 1
    print_table(("count", "op", "implementation"), _counted(ops))

    parts: Counter[tuple[str, str, str]] = Counter()
    own = discover().provider_of(__name__)
    for part in explained.classes:
        # The usual classes of opgraft without a remark tell nothing new.
        if part.remark or part.provider != own:
            parts[part.name, f"{part.cls} of {part.provider}", part.remark] += 1
    if parts:
        echo()
        print_table(("count", "part", "implementation", ""), _counted(parts))


def _counted(rows: Counter[Any]) -> list[tuple[object, ...]]:
    """Return the rows of a table with their counts, the most frequent first."""
    return [(count, *row) for row, count in rows.most_common()]


def _speed(outputs: Sequence[RequestOutput], seconds: float) -> str:
    tokens = _tokens(outputs)
    given = sum(len(output.prompt_token_ids) for output in outputs)
    return (
        f"{given} tokens of prompt, {tokens} of answer in {seconds:.1f} s on "
        f"{current_platform().name}: {tokens / seconds:.1f} tokens per second"
    )


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _print_as_json(
    llm: LLM,
    model: str,
    prompts: Sequence[str],
    outputs: Sequence[RequestOutput],
    seconds: float,
    comparison: ModelComparison | None,
) -> None:
    answers = []
    for prompt, output in zip(prompts, outputs, strict=True):
        for index, answer in enumerate(output.outputs):
            row = {
                "prompt": prompt,
                "prompt_tokens": len(output.prompt_token_ids),
                "answer": shown_text(llm, output, index),
                "tokens": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "error": answer.error,
            }
            answers.append(row)
    data = {
        "model": model,
        "platform": current_platform().name,
        "decision": selected_platform().decision.to_dict(),
        "cache_tokens": llm.replicas.cache_tokens,
        "answers": answers,
        "seconds": seconds,
        "tokens_per_second": _tokens(outputs) / seconds,
        "comparison": comparison.to_dict() if comparison else None,
        **llm.explain().to_dict(),
    }
    print_json("opgraft.answer/2", data)
