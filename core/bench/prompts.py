"""Prompts of a load test, and the times at which they are sent."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from opgraft.errors import InputError

_WORDS = tuple(
    """
    the of and to in is was for on that by this with you it not or be are from at as your all have new more an one
    time would there what so up out if about who get which go me when make can like no just him know take people
    into year good some could them see other than then now look only come its over think also back after use two
    how our work first well way even want because any these give day most us water light stone river house field
    """.split()  # noqa: SIM905 - a list of as many strings is long to read
)
"""Common words, which most tokenizers know as one token each."""


@dataclass(frozen=True)
class Prompt:
    """Content of a request.

    Attributes:
        content: a text, or the messages of a chat.
        max_tokens: of the answer; None for what the load test has for all.
    """

    content: str | list[dict[str, Any]]
    max_tokens: int | None = None

    def body(self, chat: bool) -> dict[str, Any]:
        """Return the prompt as a field of a request for a chat or a completion."""
        if not chat:
            return {"prompt": self.content}
        as_messages = (
            [{"role": "user", "content": self.content}]
            if isinstance(self.content, str)
            else self.content
        )
        return {"messages": as_messages}


def random_prompts(number: int, words: int, seed: int) -> list[Prompt]:
    """Return prompts of random words, which share no beginning that a server could have cached."""
    source = random.Random(seed)  # noqa: S311 - nothing secret
    return [Prompt(" ".join(source.choices(_WORDS, k=words))) for _ in range(number)]


def read_prompts(file: Path, number: int) -> list[Prompt]:
    """Read prompts from a file, from its first line again where it has fewer than ``number``.

    A line of a ``.jsonl`` file is a string, or an object with ``prompt`` or ``messages``, and ``max_tokens`` if it has
    one of its own. A line of any other file is a prompt.

    Raises:
        InputError: the file cannot be read, or has a line that is no prompt, or none that is one.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the prompts in {file} cannot be read ({error}): give a file of UTF-8 text"
        ) from error
    if not lines:
        raise InputError(f"{file} has no prompts: put one on each line")
    if file.suffix == ".jsonl":
        prompts = [
            _parsed(line, f"line {place} of {file}") for place, line in enumerate(lines, start=1)
        ]
    else:
        prompts = [Prompt(line) for line in lines]
    return list(islice(cycle(prompts), number))


def _parsed(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON ({error}): write a string or an object") from error
    fields = found if isinstance(found, dict) else {"prompt": found}
    content, max_tokens = fields.get("messages", fields.get("prompt")), fields.get("max_tokens")
    if not content or not isinstance(content, list if "messages" in fields else str):
        raise InputError(
            f"{where} is no prompt: write a string, or an object with 'prompt' or 'messages'"
        )
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise InputError(
            f"{where} has max_tokens that are no count: write an integer from 1, or leave them out"
        )
    return Prompt(content, max_tokens)


def arrivals(number: int, rate: float, poisson: bool, seed: int) -> Sequence[float]:
    """Return the seconds at which requests are sent, ``rate`` of them in a second on average, the first at 0."""
    source = random.Random(seed)  # noqa: S311 - nothing secret

    def gaps() -> Iterator[float]:
        while True:
            yield source.expovariate(rate) if poisson else 1 / rate

    times = [0.0]
    for gap in islice(gaps(), number - 1):
        times.append(times[-1] + gap)
    return times
