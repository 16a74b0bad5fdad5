"""Structured output: grammars that say which tokens may come next, by llguidance."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opgraft.base.text import described
from opgraft.engine.structured_form import KINDS, expect_form
from opgraft.errors import InputError, RequestError
from opgraft.machine.child import run_child
from opgraft.models.extras import import_extra
from torch import Tensor

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the tokens of JSON; without a limit small models write blanks until their tokens are used up."""

COMPILE_SECONDS = 5
"""Of processor time, which other work on the machine does not take away from a grammar."""

_PATIENCE = 6 * COMPILE_SECONDS
"""Seconds on the clock after which even a busy machine has given it so much."""

_TRIAL = """
import resource
seconds = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
import llguidance
llguidance.LLMatcher.validate_grammar(data)
"""
_MOST_LEXER_STATES = 50_000
"""Of one request, each of 1 to 2 kB. The library's limits on steps bound the time of a mask to some 20 ms."""


class GrammarTokens:
    """The tokens of a model as grammars need them; made once per model, as it takes most of a second.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        vocabulary: tokens that the model gives logits for; the tokenizer's number if not given.
        eos: tokens that end an output; the tokenizer's own if empty.

    Attributes:
        made_of: these three, of which another process makes the same.

    Raises:
        InputError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int | None = None, eos: Iterable[int] = ()
    ) -> None:
        self.library: Any = import_extra("llguidance", "structured")
        self.made_of = tokenizer, vocabulary, tuple(eos)
        try:
            text = tokenizer.to_str()
            self.tokens: Any = self.library.LLTokenizer(
                text, n_vocab=vocabulary, eos_token=sorted(self.made_of[2]) or None
            )
        except Exception as error:  # it raises ValueError for most faults, and others from Rust
            raise InputError(
                f"the tokenizer {type(tokenizer).__name__} cannot serve structured outputs: {described(error)}. "
                "Use a checkpoint with a fast tokenizer (tokenizer.json)."
            ) from error


class Grammar:
    """A compiled grammar, from which each request starts a state of its own.

    Args:
        spec: a mapping with one key: ``json`` (a JSON schema, as mapping or text), ``regex``, ``choice`` (a list of
            texts) or ``grammar`` (in the syntax of Lark or GBNF).
        tokens: of the model.

    Attributes:
        spec, tokens: these two.

    Raises:
        InputError: the spec is of another form, invalid, asks for what the library does not have, or nothing can meet
            it.
    """

    def __init__(self, spec: Any, tokens: GrammarTokens) -> None:
        kind, source = _compilable(spec, tokens.library)
        limits = tokens.library.LLParserLimits(
            max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False
        )
        self.spec, self.tokens = spec, tokens
        self._kind = kind
        self._first: Any = tokens.library.LLMatcher(
            tokens.tokens, source, log_level=0, limits=limits
        )
        if self._first.is_error():
            reason = self._first.get_error()
            raise InputError(
                f"structured output: the {KINDS[kind]} in {kind} cannot be used: {_line(reason)}"
            )
        self._check_that_something_meets_it()

    def start(self, output: Iterable[int] = ()) -> GrammarState:
        """Start a request's state, with the tokens that it has sampled already.

        Raises:
            RequestError: the output does not follow the grammar.
        """
        state = GrammarState(self._first.deep_copy(), self.tokens.tokens)
        for token in output:
            state.accept(token)
        return state

    def _check_that_something_meets_it(self) -> None:
        probe = self._first.deep_copy()
        probe.compute_bitmask()  # which finds out that no token leads on
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise InputError(
                f"structured output: nothing can meet the {KINDS[self._kind]} in {self._kind}, as it allows no first "
                "token: correct it"
            )


def try_to_compile(spec: Any, tokens: GrammarTokens) -> None:
    """Compile a grammar in a child process, as nothing ends the library where that goes on for ever.

    Args:
        spec, tokens: as for ``Grammar``.

    Raises:
        InputError: it takes longer than ``COMPILE_SECONDS``, ends the process, or has no valid form.
        ChildError: no process can be started.
    """
    kind, source = _compilable(spec, tokens.library)
    ended = run_child(_TRIAL, [str(COMPILE_SECONDS)], source, _PATIENCE)
    if ended.status != 0:
        within = (
            f" within {COMPILE_SECONDS} seconds" if ended.status in (None, -signal.SIGXCPU) else ""
        )
        raise InputError(
            f"structured output: the {KINDS[kind]} in {kind} cannot be compiled{within}: simplify it"
        )


class GrammarState:
    """The state of one request in its grammar."""

    def __init__(self, matcher: Any, tokens: Any) -> None:
        self._matcher, self._tokens = matcher, tokens
        self._words = -(-tokens.vocab_size // 32)

    @property
    def finished(self) -> bool:
        """Tell whether nothing but an end may follow."""
        return bool(self._matcher.is_stopped())

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next: bit ``t % 32`` of ``mask[t // 32]`` for token ``t``.

        Args:
            mask: ``[words]``, int32, contiguous, on the CPU. Words beyond the grammar's vocabulary become 0.

        Raises:
            RequestError: the grammar has come to where nothing can follow, or to a limit of the library.
        """
        room = mask if len(mask) == self._words else mask.new_empty(self._words)
        try:
            self._matcher.unsafe_compute_mask_ptr(room.data_ptr(), 4 * len(room))
        except Exception as error:  # whatever the library raises fails one request
            raise RequestError(f"its grammar cannot go on: {described(error)}") from error
        if self._matcher.is_error():
            raise RequestError(f"its grammar cannot go on: {_line(self._matcher.get_error())}")
        if room is not mask:
            shared = min(len(mask), len(room))
            mask.zero_()[:shared] = room[:shared]

    def accept(self, token: int) -> None:
        """Go on by a token; after the end, by further ends, as under ``ignore_eos``.

        Raises:
            RequestError: the grammar does not allow it here, or the library fails.
        """
        if self.finished and token in self._tokens.eos_tokens:
            return
        try:
            allowed = self._matcher.consume_token(token)
        except Exception as error:  # whatever the library raises fails one request
            raise RequestError(
                f"its grammar cannot take token {token}: {described(error)}"
            ) from error
        if not allowed:
            raise RequestError(
                f"token {token} does not follow the grammar of the structured output here: "
                f"{_line(self._matcher.get_error())}"
            )


def _source(library: Any, kind: str, text: str) -> str:
    if kind == "json":
        return str(
            library.LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": WHITESPACE}
            )
        )
    return str(library.grammar_from(kind, text))


def _compilable(spec: Any, library: Any) -> tuple[str, str]:
    """Return the kind of a grammar, and its source as the library compiles it."""
    kind, value = expect_form(spec)
    try:
        return kind, _source(library, kind, _TEXTS.get(kind, str)(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"structured output: {kind} is no valid {KINDS[kind]}: {described(error)}"
        ) from error


def _schema(value: Any) -> str:
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, Mapping):
        raise TypeError(f"{schema!r:.80}, expected an object")
    return json.dumps(schema)


def _choices(value: Any) -> str:
    return json.dumps(list(value))


def _line(text: str) -> str:
    """Give the beginning of a message of the library, which may end with a dump of its state, as one line."""
    return " ".join(text.partition("\n<")[0].split())[:400]


_TEXTS: Mapping[str, Callable[[Any], str]] = {"json": _schema, "choice": _choices}
