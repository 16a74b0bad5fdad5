"""Text from growing lists of tokens, at a constant cost for each token, with stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from io import StringIO
from typing import Any

from opgraft.models.extras import import_extra
from opgraft.serving.stop_strings import StopStrings
from opgraft.serving.tokenizer import Tokenizer

MOST_HELD = 16
"""Tokens that may wait for the rest of a character.

The library decodes all of them again for each further token.
"""

_LONGEST_CHARACTER = 4
"""Bytes, and so tokens, of a character in UTF-8."""
_BROKEN = "\ufffd"


class Detokenizer:
    """The text of one request.

    An unfinished last character is held back. The text of a token may depend on earlier tokens, so
    the end of the prompt is decoded with the first tokens. Without stop strings, tokens are decoded
    when the text is read.

    Args:
        tokenizer: the model's.
        prompt: token ids before the first; only the end is read.
        skip_special_tokens: leave special tokens, such as ``bos_token``, out of the text.
        stop: strings that end the text; none may be empty.
        include_stop_str_in_output: end the text after the stop string, not before.
        min_tokens: number of first tokens without a search for stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = StopStrings(stop, include=include_stop_str_in_output) if stop else None
        self._unsearched = min_tokens
        self._written = StringIO()
        self._added: deque[int] = deque()
        self._waiting: list[int] = []
        self._context: list[int] = []
        self._stream: Any = None
        self._restart(self._end_of(prompt))

    @property
    def written(self) -> StringIO:
        """All certain text so far, up to a stop string."""
        self._catch_up()
        return self._written

    @property
    def text(self) -> str:
        """All certain text so far, as one string."""
        return self.written.getvalue()

    @property
    def place(self) -> int:
        """The place of the next token in the text, in characters.

        A token that continues a character has the place of this character.
        """
        place = self.written.tell()
        if not self._waiting:
            return place
        before = self._decode(self._context)
        held = self._decode([*self._context, *self._waiting]).removeprefix(before)
        # The library shows an unfinished character as U+FFFD.
        whole = held.rstrip(_BROKEN)
        return place + len(whole)

    @property
    def stop_reason(self) -> str | None:
        """The stop string at the end of the text, or None."""
        return self._stops.found if self._stops else None

    def add(self, token: int) -> bool:
        """Add a token, and return True if the text now has a stop string."""
        self._added.append(token)
        if self._stops is None:
            return False
        self._catch_up()
        return self._stops.found is not None

    def finish(self) -> None:
        """Write the held-back text after the last token. The text may end with U+FFFD."""
        self._catch_up()
        self._show(self._flush(len(self._waiting)))
        if self._stops and self._stops.found is None:
            self._written.write(self._stops.rest())

    def _catch_up(self) -> None:
        while self._added:
            self._show(self._decoded(self._added.popleft()))

    def _show(self, piece: str) -> None:
        if self._stops and self._unsearched <= 0:
            piece = self._stops.add(piece)
        # Called once for each token, even if the token shows no text yet.
        self._unsearched -= 1
        self._written.write(piece)

    def _decoded(self, token: int) -> str:
        self._waiting.append(token)
        try:
            piece = self._stream.step(self._tokenizer.backend, token)
        # The library gives up if further bytes change the text that it has returned.
        except Exception:
            return self._flush(len(self._waiting))
        if piece is not None:
            self._context = self._waiting
            self._waiting = []
            return str(piece)
        if len(self._waiting) < MOST_HELD:
            return ""
        return self._flush(self._border())

    def _border(self) -> int:
        """Return the number of waiting tokens before the last character, whole or not."""
        whole = self._decode(self._waiting)
        count = len(self._waiting)
        for border in range(count - 1, count - 1 - _LONGEST_CHARACTER, -1):
            before = self._decode(self._waiting[:border])
            after = self._decode(self._waiting[border:])
            # A cut within a character would give broken characters on both sides.
            if before + after == whole:
                return border
        return count

    def _flush(self, count: int) -> str:
        """Return the text of the first waiting tokens, broken or not.

        The other waiting tokens are decoded by a new stream.
        """
        if not count:
            return ""
        done = self._waiting[:count]
        waiting = self._waiting[count:]
        # With the tokens before, as the text of a token may depend on these.
        before = self._decode(self._context)
        text = self._decode([*self._context, *done])
        self._waiting = []
        self._restart(done[-MOST_HELD:])
        rest = "".join(map(self._decoded, waiting))
        return text.removeprefix(before) + rest

    def _restart(self, context: list[int]) -> None:
        """Begin a stream after ``context``."""
        self._context = context
        streams = import_extra("tokenizers").decoders
        self._stream = streams.DecodeStream(ids=list(context), skip_special_tokens=self._skip)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the fewest last tokens of a prompt, at least four, without a broken character."""
        for length in range(_LONGEST_CHARACTER, MOST_HELD):
            end = list(prompt[-length:])
            if _BROKEN not in self._decode(end):
                return end
        # The text of such a prompt is broken itself, and no context helps.
        return []
