"""``opgraft chat``: a chat with a language model in a terminal, or over lines of a pipe."""

from __future__ import annotations

import functools
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

import click
from opgraft.base.text import printable
from opgraft.cli.answers import stdout_for_answers
from opgraft.cli.output import (
    COMMAND_LINE,
    SHORT_OF_MODELS,
    SettingsCommand,
    echo,
    with_model_settings,
)
from opgraft.config.checkpoints import find_checkpoint
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from opgraft.registry.state import host_state

if TYPE_CHECKING:
    from opgraft.serving.llm import LLM
    from opgraft.serving.open_request import OpenRequest
    from opgraft.serving.outputs import RequestOutput

_MOST_TOKENS = 512
_LONGEST_LINE = 1 << 22
"""Characters of a line of stdin."""

_PROMPT = "> "
_KEYS = "/clear begins a new chat, /exit or Ctrl-D ends it, Ctrl-C ends an answer"


_SHORT = {**SHORT_OF_MODELS, "model.chat_template": "--chat-template"}


@click.command("chat", cls=SettingsCommand)
@click.argument("model")
@click.option("--system", metavar="TEXT", help="Told to the model before the chat.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=_MOST_TOKENS,
    show_default=True,
    help="Of an answer.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    help="Of answers [default: 0, the likeliest].",
)
@functools.partial(with_model_settings, short=_SHORT)
def command(model: str, system: str | None, max_tokens: int, temperature: float) -> None:
    """Chat with MODEL in the terminal, or over the lines of stdin.

    /clear begins a new chat, /exit or Ctrl-D ends it, Ctrl-C ends an answer.
    """
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    find_checkpoint(model)
    # These import torch, and --help needs no torch.
    from opgraft.cli.answer import open_llm, show_idle_plugins, show_stream
    from opgraft.models.build import generates
    from opgraft.serving.engine_settings import engine_config

    if not generates(engine_config(model, None, {})):
        raise RequestError(
            f"{model} is an encoder, and embeds texts: 'opgraft run MODEL TEXT…' compares them"
        )
    llm = open_llm(model)
    show_idle_plugins()
    if not llm.chats:
        raise RequestError(
            f"{model} has no chat template, so how it was taught to chat is not known: 'opgraft "
            "run MODEL PROMPT' continues a text without one; or put a chat_template.jinja beside "
            "the weights"
        )
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    Chat(llm, params, system, show_stream).hold()


class Chat:
    """A chat with its history."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        show: Callable[[LLM, OpenRequest], RequestOutput],
    ) -> None:
        self.llm = llm
        self.show = show
        self.params = params
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.first)
        self.numbers = count()

    def hold(self) -> None:
        """Answer every line to the end of the input.

        Raises:
            RequestError: an answer failed, and the input is no terminal.
        """
        interactive = sys.stdin.isatty()
        if interactive:
            click.echo(_KEYS, err=True)
        for line in _typed() if interactive else _lines():
            if line == "/exit":
                return
            if line == "/clear":
                self.messages = list(self.first)
            # A pipe may hold lines such as paths, and people type a slash for a command.
            elif interactive and line.startswith("/") and " " not in line:
                click.echo(f"there is no command {printable(line)}: {_KEYS}", err=True)
            elif line:
                try:
                    self.answer(line)
                except RequestError as error:
                    # A person at a terminal can ask something else.
                    if not interactive:
                        raise
                    click.echo(f"error: {error} (/clear begins a new chat)", err=True)

    def answer(self, text: str) -> None:
        """Answer a message, and keep message and answer. A failure leaves the chat unchanged.

        Raises:
            RequestError: the chat has become too long, the template refuses the chat, or the answer
                failed.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = self.llm.engine.inputs
        prompt = inputs.render_chat(messages)
        number = str(next(self.numbers))
        request = inputs.prepare(number, prompt, self.params, add_special_tokens=False)
        output = self.show(self.llm, request)
        [answer] = output.outputs
        if answer.error is not None:
            raise RequestError(f"the answer failed: {answer.error}")
        said = inputs.chat_format.user_text(output.prompt_token_ids).read(answer)
        self.messages = [*messages, {"role": "assistant", "content": said}]


def _lines() -> Iterator[str]:
    """Yield the lines of stdin.

    Raises:
        RequestError: a line is too long.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        line = sys.stdin.readline(_LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > _LONGEST_LINE:
            raise RequestError(
                f"a line of stdin has more than {_LONGEST_LINE:,} characters: break it"
            )
        yield line.strip()


def _typed() -> Iterator[str]:
    """Yield the lines of the terminal. Ctrl-C takes a line back, Ctrl-D ends the input."""
    # Gives input() a history.
    importlib.import_module("readline")
    while True:
        try:
            with stdout_for_answers():
                line = input(_PROMPT)
            yield line.strip()
        except KeyboardInterrupt:
            echo()
        except EOFError:
            echo()
            return
