"""Structured output: grammars of the next tokens, compiled by llguidance."""

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
"""Between the tokens of JSON. Without a limit, small models fill the whole output with blanks."""

COMPILE_SECONDS = 5
"""Of processor time. Unlike time on the clock, other work on the machine does not use it up."""

_PATIENCE = 6 * COMPILE_SECONDS
"""Seconds on the clock, enough for ``COMPILE_SECONDS`` of processor time on a busy machine."""

_TRIAL = """
import resource
seconds = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
import llguidance
llguidance.LLMatcher.validate_grammar(data)
"""
_MOST_LEXER_STATES = 50_000
"""Of one request, each of 1 to 2 kB. The library itself limits the time of a mask to some 20 ms."""


class GrammarTokens:
    """The tokens of a model in the form for grammars. Made once per model, in nearly a second.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        vocabulary: number of logits of the model; by default, the tokenizer's number.
        eos: tokens that end an output; the tokenizer's own if empty.

    Attributes:
        made_of: these three arguments, from which another process makes an equal object.

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
        # ValueError for most faults, and errors of other classes from Rust.
        except Exception as error:
            raise InputError(
                f"the tokenizer {type(tokenizer).__name__} cannot serve structured outputs: "
                f"{described(error)}. Use a checkpoint with a fast tokenizer (tokenizer.json)."
            ) from error


class Grammar:
    """A compiled grammar. Each request starts a state of its own.

    Args:
        spec: a mapping with one key: ``json`` (a JSON schema, as mapping or text), ``regex``,
            ``choice`` (a list of texts) or ``grammar`` (in the syntax of Lark or GBNF).
        tokens: of the model.

    Attributes:
        spec, tokens: the arguments.

    Raises:
        InputError: the spec has another form, is invalid, needs a feature that the library lacks,
            or has no output that meets it.
    """

    def __init__(self, spec: Any, tokens: GrammarTokens) -> None:
        kind, source = _compilable(spec, tokens.library)
        limits = tokens.library.LLParserLimits(
            max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False
        )
        self.spec = spec
        self.tokens = tokens
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
        """Start the state of a request, with its output so far.

        Raises:
            RequestError: the output does not follow the grammar.
        """
        state = GrammarState(self._first.deep_copy(), self.tokens.tokens)
        for token in output:
            state.accept(token)
        return state

    def _check_that_something_meets_it(self) -> None:
        probe = self._first.deep_copy()
        # The library notices a missing first token only when it computes a mask.
        probe.compute_bitmask()
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise InputError(
                f"structured output: nothing can meet the {KINDS[self._kind]} in {self._kind}, as "
                "it allows no first token: correct it"
            )


def try_to_compile(spec: Any, tokens: GrammarTokens) -> None:
    """Compile a grammar in a child process, because a compilation may never end.

    Args:
        spec, tokens: as for ``Grammar``.

    Raises:
        InputError: the compilation takes longer than ``COMPILE_SECONDS`` or ends the process, or
            the spec has no valid form.
        ChildError: no process can be started.
    """
    kind, source = _compilable(spec, tokens.library)
    ended = run_child(_TRIAL, [str(COMPILE_SECONDS)], source, _PATIENCE)
    if ended.status == 0:
        return
    ran_out_of_time = ended.status in (None, -signal.SIGXCPU)
    within = f" within {COMPILE_SECONDS} seconds" if ran_out_of_time else ""
    raise InputError(
        f"structured output: the {KINDS[kind]} in {kind} cannot be compiled{within}: simplify it"
    )


class GrammarState:
    """The state of one request in its grammar."""

    def __init__(self, matcher: Any, tokens: Any) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._words = -(-tokens.vocab_size // 32)

    @property
    def finished(self) -> bool:
        """Return True if only an end of the output may follow."""
        return bool(self._matcher.is_stopped())

    def fill(self, mask: Tensor) -> None:
        """Set a bit for each token that may come next: bit ``t % 32`` of ``mask[t // 32]``.

        Args:
            mask: ``[words]``, int32, contiguous, on the CPU. Words beyond the grammar's vocabulary
                become 0.

        Raises:
            RequestError: no token can follow, or the grammar exceeds a limit of the library.
        """
        # The library writes a fixed number of words.
        room = mask if len(mask) == self._words else mask.new_empty(self._words)
        try:
            self._matcher.unsafe_compute_mask_ptr(room.data_ptr(), 4 * len(room))
        # Any error of the library fails one request only.
        except Exception as error:
            raise RequestError(f"its grammar cannot go on: {described(error)}") from error
        if self._matcher.is_error():
            raise RequestError(f"its grammar cannot go on: {_line(self._matcher.get_error())}")
        if room is not mask:
            shared = min(len(mask), len(room))
            mask.zero_()[:shared] = room[:shared]

    def accept(self, token: int) -> None:
        """Go on by one token. After the end of the grammar, ends may repeat under ``ignore_eos``.

        Raises:
            RequestError: the grammar does not allow the token here, or the library fails.
        """
        if self.finished and token in self._tokens.eos_tokens:
            return
        try:
            allowed = self._matcher.consume_token(token)
        # Any error of the library fails one request only.
        except Exception as error:
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
        defaults = {"whitespace_pattern": WHITESPACE}
        return str(library.LLMatcher.grammar_from_json_schema(text, defaults=defaults))
    return str(library.grammar_from(kind, text))


def _compilable(spec: Any, library: Any) -> tuple[str, str]:
    """Return the kind of a grammar, and its source for the library."""
    kind, value = expect_form(spec)
    text_of = _TEXTS.get(kind, str)
    try:
        return kind, _source(library, kind, text_of(value))
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
    """Return the beginning of a message of the library as one line."""
    # After the message, the library may print a dump of its state.
    message, _, _ = text.partition("\n<")
    return " ".join(message.split())[:400]


_TEXTS: Mapping[str, Callable[[Any], str]] = {"json": _schema, "choice": _choices}
