"""The answer of ``opgraft run MODEL PROMPT``, shown as it is generated."""

from __future__ import annotations

import dataclasses
import sys
import time

import click
from opgraft.cli.output import discard_stdout, echo, print_json
from opgraft.models.build import load_model
from opgraft.models.config import load_tokenizer
from opgraft.models.files import open_weights, opened_once
from opgraft.models.generation import decoded, generate, prompt_tokens, stop_tokens
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.state import host_state
from opgraft.text import printable


def answer_prompt(name: str, prompt: str, dtype: str | None, max_tokens: int, as_json: bool) -> None:
    """Load a model, answer a prompt greedily, and print the answer; ``dtype`` goes before the setting."""
    settings = host_state().settings().config
    chosen = dataclasses.replace(settings.model, name=name, dtype=dtype or settings.model.dtype)
    with opened_once():
        model = load_model(dataclasses.replace(settings, model=chosen))
        tokenizer = load_tokenizer(open_weights(name))
    given = prompt_tokens(tokenizer, prompt)
    tokens: list[int] = []
    start = time.perf_counter()
    stop = stop_tokens(tokenizer, model.config)
    stream = generate(model, given, max_tokens=max_tokens, stop=stop)
    pieces = decoded(tokenizer, (tokens.append(token) or token for token in stream))  # type: ignore[func-returns-value]
    answer = "".join(piece if as_json else _shown(piece) for piece in pieces)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(
            "opgraft.answer/1",
            {
                "model": name,
                "platform": current_platform().name,
                "decision": selected_platform().decision.to_dict(),
                "prompt": prompt,
                "prompt_tokens": len(given),
                "answer": answer,
                "tokens": tokens,
                "seconds": seconds,
            },
        )
        return
    echo()
    words = f"{len(given)} tokens of prompt, {len(tokens)} of answer in {seconds:.1f} s on {current_platform().name}"
    click.echo(words, err=True)


def _shown(piece: str) -> str:
    """Write a part of the answer to stdout at once; line breaks stay, terminal sequences are shown escaped."""
    text = "\n".join(map(printable, piece.split("\n")))
    try:
        click.echo(text, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    return piece
