"""The answers of ``opgraft run MODEL PROMPT…``: one is shown as it is generated, several are computed at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace

import click
import torch
from opgraft.base.text import printable
from opgraft.binding.idle_plugins import idle_plugins
from opgraft.cli.answers import answers
from opgraft.cli.comparison import Comparison, Measurement, timed
from opgraft.cli.output import discard_stdout, echo, print_json, print_table
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from opgraft.planning.splits import expect_split
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.interrupts import Interrupts
from opgraft.serving.llm import LLM, Interrupted
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.text_engine import TextEngine


def open_llm(model: str) -> LLM:
    """Load a model, and print on stderr how much the cache holds, if there is one."""
    expect_split(engine_config(model, None, {}).resolved())
    llm = LLM(model)
    if not llm.embeds:
        click.echo(llm.capacity(), err=True)
    return llm


def show_idle_plugins() -> None:
    """Print a line on stderr for each active plugin that has no kernel for this process."""
    for idle in idle_plugins():
        click.echo(str(idle), err=True)


def measure_answers(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Measurement:
    """Answer prompts and take the time; what is prepared at the first call is not in it.

    Raises:
        RequestError: a prompt cannot be taken, or failed.
        Interrupted: after an interrupt.
    """
    logits: dict[str, torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], values: torch.Tensor) -> torch.Tensor:
        logits[str(prompt)] = values.float().cpu()
        return values

    first = _ask(llm, prompts, replace(params, max_tokens=1, logits_processors=(keep,)))
    outputs, seconds = timed(lambda: _ask(llm, prompts, params))
    expect_answers(llm, outputs)
    numbers = torch.stack([logits[str(output.prompt_token_ids)] for output in first])
    return Measurement(
        numbers, [output.outputs[0].token_ids for output in outputs], _tokens(outputs), seconds
    )


def answer_prompts(
    llm: LLM,
    model: str,
    prompts: Sequence[str],
    params: SamplingParams,
    as_json: bool,
    comparison: Comparison | None = None,
) -> None:
    """Answer prompts, in the chat template where there is one, and print the answers; what it took goes to stderr.

    Raises:
        RequestError: a prompt cannot be taken, or failed.
        Abort: after an interrupt, when what there is has been printed.
    """
    start = time.perf_counter()
    if len(prompts) == 1 and not as_json:
        outputs = [_streamed(llm, prompts[0], params)]
    else:
        outputs = _at_once(llm, prompts, params)
    seconds = time.perf_counter() - start
    if as_json:
        _print_as_json(llm, model, prompts, outputs, seconds, comparison)
    elif len(prompts) > 1:
        _print_as_text(prompts, outputs)
        print_kernels(llm)
    if comparison and not as_json:
        echo()
        comparison.print()
    if not as_json and _tokens(outputs):  # none where every request has failed
        click.echo(_speed(outputs, seconds), err=True)
    if any(output.outputs[0].finish_reason == "abort" for output in outputs):
        raise click.Abort
    expect_answers(llm, outputs)


def _streamed(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    chats = llm.chats
    inputs = llm.engine.inputs
    text = inputs.chat_template.render([_message(prompt)]) if chats else prompt
    return show_stream(llm, inputs.prepare("0", text, params, add_special_tokens=not chats))


def _at_once(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
    try:
        return _ask(llm, prompts, params)
    except Interrupted as interrupted:
        return interrupted.outputs


def _ask(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
    if llm.chats:
        return llm.chat([[_message(prompt)] for prompt in prompts], params)
    return llm.generate(prompts, params)


def expect_answers(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """Raise if answers have failed.

    Raises:
        Exception: the one that a plugin's kernel raised in a step.
        RequestError: for all other reasons.
    """
    failed = [
        str(output.outputs[0].error)
        for output in outputs
        if output.outputs[0].finish_reason == "error"
    ]
    if not failed:
        return
    for replica in llm.replicas.each:
        engine = replica.engine
        if isinstance(engine, TextEngine) and engine.core.step_failure is not None:
            raise engine.core.step_failure
    raise RequestError(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")


def _message(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def show_stream(llm: LLM, request: OpenRequest) -> RequestOutput:
    """Show an answer on stdout as it grows, and a line break after it; an interrupt ends the answer.

    Args:
        llm: computes the answer.
        request: with one answer.

    Returns:
        The answer, so far as it was computed.
    """
    shown = 0
    interrupts = Interrupts()
    with (
        interrupts.awaited(),
        closing(llm.answers([request], grows=True, interrupts=interrupts)) as news,
        suppress(Interrupted),
    ):
        for output in news:
            text = output.outputs[0].text
            # A terminal shows a token at once, and not the whole answer again.
            _show(text[shown:])
            shown = len(text)
    answer = request.output.outputs[0]
    if answer.text or answer.error is None:
        _show(f"{answer.text[shown:]}\n")
    return request.output


def _show(piece: str) -> None:
    """Write a part of an answer to stdout at once; line breaks stay, terminal sequences are shown escaped."""
    try:
        click.echo(_harmless(piece), nl=False, file=answers())
    except BrokenPipeError:
        discard_stdout()


def _harmless(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _print_as_text(prompts: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        echo(f"> {printable(prompt)}\n{_harmless(output.outputs[0].text)}\n")


def print_kernels(llm: LLM) -> None:
    """Print which kernel of whom runs each op, how often the model has it, and what other parts say of themselves."""
    explained = llm.explain()
    running = [row for row in explained.rows if row.runs]
    counts = Counter((row.op or row.op_class, f"{row.kernel} of {row.provider}") for row in running)
    print_table(
        ("count", "op", "implementation"), [(count, *key) for key, count in counts.most_common()]
    )
    told = [
        row
        for row in explained.classes
        if row.remark or row.provider != discover().provider_of(__name__)
    ]
    parts = Counter((row.name, f"{row.cls} of {row.provider}", row.remark) for row in told)
    if parts:
        echo()
        print_table(
            ("count", "part", "implementation", ""),
            [(count, *key) for key, count in parts.most_common()],
        )


def _speed(outputs: Sequence[RequestOutput], seconds: float) -> str:
    tokens = _tokens(outputs)
    given = sum(len(output.prompt_token_ids) for output in outputs)
    return (
        f"{given} tokens of prompt, {tokens} of answer in {seconds:.1f} s on {current_platform().name}: "
        f"{tokens / seconds:.1f} tokens per second"
    )


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _print_as_json(
    llm: LLM,
    model: str,
    prompts: Sequence[str],
    outputs: Sequence[RequestOutput],
    seconds: float,
    comparison: Comparison | None,
) -> None:
    answers = [
        {
            "prompt": prompt,
            "prompt_tokens": len(output.prompt_token_ids),
            "answer": answer.text,
            "tokens": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "error": answer.error,
        }
        for prompt, output in zip(prompts, outputs, strict=True)
        for answer in output.outputs
    ]
    print_json(
        "opgraft.answer/2",
        {
            "model": model,
            "platform": current_platform().name,
            "decision": selected_platform().decision.to_dict(),
            "cache_tokens": llm.replicas.cache_tokens,
            "answers": answers,
            "seconds": seconds,
            "tokens_per_second": _tokens(outputs) / seconds,
            "comparison": comparison.to_dict() if comparison else None,
            **llm.explain().to_dict(),
        },
    )
