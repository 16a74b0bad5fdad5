"""The answer of ``opgraft run MODEL PROMPT``, shown as it is generated."""

from __future__ import annotations

import dataclasses
import sys
import time

import click
from opgraft.cli.output import discard_stdout, echo, print_json
from opgraft.models.build import load_model
from opgraft.models.files import open_weights, opened_once
from opgraft.models.generation import generate, stop_tokens
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.serving.chat_template import ChatTemplate
from opgraft.serving.detokenizer import Detokenizer
from opgraft.serving.prompts import tokenized
from opgraft.serving.tokenizer import open_tokenizer
from opgraft.state import host_state
from opgraft.text import printable


def answer_prompt(name: str, prompt: str, dtype: str | None, max_tokens: int, as_json: bool) -> None:
    """Load a model, answer a prompt greedily, and print the answer; ``dtype`` goes before the setting."""
    settings = host_state().settings().config
    chosen = dataclasses.replace(settings.model, name=name, dtype=dtype or settings.model.dtype)
    with opened_once():
        model = load_model(dataclasses.replace(settings, model=chosen))
        tokenizer = open_tokenizer(open_weights(name))
        stop = stop_tokens(tokenizer, model.config, open_weights(name))
    chats = bool(tokenizer.chat_templates)
    text = ChatTemplate(tokenizer).render([{"role": "user", "content": prompt}]) if chats else prompt
    size, longest = tokenizer.vocab_size, int(model.max_position)
    _, given = tokenized(text, tokenizer, vocab_size=size, max_model_len=longest, add_special_tokens=not chats)
    detokenizer = Detokenizer(tokenizer, given)
    tokens: list[int] = []
    start = time.perf_counter()
    for token in generate(model, given, max_tokens=max_tokens, stop=stop):
        tokens.append(token)
        _show(detokenizer.add(token), as_json)
    _show(detokenizer.finish(), as_json)
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
                "answer": detokenizer.text,
                "tokens": tokens,
                "seconds": seconds,
            },
        )
        return
    echo()
    words = f"{len(given)} tokens of prompt, {len(tokens)} of answer in {seconds:.1f} s on {current_platform().name}"
    click.echo(words, err=True)


def _show(piece: str, as_json: bool) -> None:
    """Write a part of the answer to stdout at once; line breaks stay, terminal sequences are shown escaped."""
    if as_json:
        return
    text = "\n".join(map(printable, piece.split("\n")))
    try:
        click.echo(text, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
