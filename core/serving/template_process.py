"""The helper process that renders chat templates, in jinja2's sandbox.

A template comes with a checkpoint and is code. The sandbox keeps a template from Python's
internals, this process has a limit of memory, and ``TemplateRenderer`` ends the process after a
limit of time. No module here imports torch, so that the process starts fast.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from opgraft.base.text import described, shortened
from opgraft.serving.template_answer import LENGTH_BYTES, MOST_CHARACTERS, READY, AnswerKind

MOST_BYTES = 1 << 29
"""Largest address space of the process."""

MOST_TEMPLATES = 16
"""Compiled templates to keep."""


def main() -> None:
    """Answer the requests on stdin until their end, or until the memory is used up.

    A request is a pickle of the source of a template, the values for the template, and a number of
    seconds. After these seconds the system ends this process, in case the parent is gone.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _environment()
    _limit_memory()
    answers.write(READY)
    answers.flush()
    _silence()
    kind = AnswerKind.TEXT
    with suppress(EOFError, ConnectionError):
        while kind is not AnswerKind.EXHAUSTED:
            source, values, seconds = pickle.load(requests)  # noqa: S301  # of our own parent
            signal.setitimer(signal.ITIMER_REAL, seconds)
            kind, text = _answer(source, values)
            encoded = text.encode("utf-8", "surrogatepass")
            answers.write(kind.value + len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
            answers.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
    # Some systems have no such limit.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _silence() -> None:
    """Drop messages of the interpreter, such as those about a lack of memory."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _answer(source: str, values: dict[str, Any]) -> tuple[AnswerKind, str]:
    """Render a template, and return the kind of the answer and its text."""
    try:
        template = _compiled(source)
    except MemoryError:
        return _exhausted()
    # Mostly of syntax, and of deep nesting.
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return AnswerKind.INVALID, f"{line} is none: {described(error)}"
    try:
        text = template.render(values)
    except MemoryError:
        return _exhausted()
    except jinja2.TemplateError as error:
        return AnswerKind.REFUSED, shortened(str(error))
    # A template can raise nearly any error.
    except Exception as error:
        return AnswerKind.REFUSED, described(error)
    if len(text) > MOST_CHARACTERS:
        return AnswerKind.REFUSED, f"it writes more than {MOST_CHARACTERS} characters"
    return AnswerKind.TEXT, text


def _exhausted() -> tuple[AnswerKind, str]:
    return AnswerKind.EXHAUSTED, f"it takes more than {MOST_BYTES >> 20} MiB of memory"


@functools.lru_cache(MOST_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox with the functions that transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now)
    # Returns random text of any length.
    del environment.globals["lipsum"]
    return environment


class _Generation(Extension):
    """The tag ``{% generation %}`` around a model's words, for training. Its content is shown."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. The filter of jinja2 itself would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateRuntimeError(message)


def _now(format: str) -> str:  # the name that templates use
    return datetime.now().strftime(format)
