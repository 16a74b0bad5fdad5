"""Prompts of a load test, and the times at which they are sent."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

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
        max_tokens: longest answer; None for that of the whole load test.
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
    """Return prompts of random words, which share no prefix that a server could have cached."""
    source = random.Random(seed)  # noqa: S311 - nothing secret
    return [Prompt(" ".join(source.choices(_WORDS, k=words))) for _ in range(number)]


def arrivals(number: int, rate: float, poisson: bool, seed: int) -> Sequence[float]:
    """Return the seconds at which to send requests: the first at 0, then ``rate`` in a second on average."""
    source = random.Random(seed)  # noqa: S311 - nothing secret

    def gaps() -> Iterator[float]:
        while True:
            yield source.expovariate(rate) if poisson else 1 / rate

    times = [0.0]
    for gap in islice(gaps(), number - 1):
        times.append(times[-1] + gap)
    return times
