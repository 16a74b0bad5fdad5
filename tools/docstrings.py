"""Docstrings and signatures in the style of this code base, as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Shapes", "Yields")


def parameters_of(function: Any) -> str:
    """Return the signature without ``self``, as it is written."""
    signature = inspect.signature(function)
    parameters, named = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parameters.append("*")
        named = named or parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        stars = (
            "*"
            if parameter.kind is parameter.VAR_POSITIONAL
            else "**" * (parameter.kind is parameter.VAR_KEYWORD)
        )
        kind = (
            ""
            if parameter.annotation is parameter.empty
            else f": {annotation(parameter.annotation)}"
        )
        equals = " = " if kind else "="
        default = (
            "" if parameter.default is parameter.empty else f"{equals}{value(parameter.default)}"
        )
        parameters.append(f"{stars}{parameter.name}{kind}{default}")
    returned = (
        ""
        if signature.return_annotation in (signature.empty, "None")
        else signature.return_annotation
    )
    return f"({', '.join(parameters)})" + (f" -> {annotation(returned)}" if returned else "")


def value(default: Any) -> str:
    return (
        default.__qualname__
        if isinstance(default, type) or inspect.isfunction(default)
        else repr(default)
    )


def annotation(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def documentation(docstring: str | None) -> Iterator[str]:
    """Yield a docstring in the style of this code base as paragraphs and lists of Markdown."""
    if not docstring:
        return
    section = ""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        head, _, rest = block.partition("\n")
        if head.rstrip(":") in SECTIONS and head.endswith(":"):
            section, block = head.rstrip(":"), textwrap.dedent(rest)
        if section in ("Args", "Attributes", "Raises"):
            yield f"{section}:\n\n" + "\n".join(items(block))
        else:
            yield filled(f"{section}: {marked(block)}" if section else marked(block))
        section = ""


def items(block: str) -> Iterator[str]:
    """Yield ``name: text`` with deeper lines below it, as list items."""
    for item in re.split(r"\n(?=\S)", block.strip()):
        name, _, text = item.partition(":")
        yield filled(f"- `{name}`: {marked(text)}", "  ")


def marked(text: str) -> str:
    """Turn text of a docstring to Markdown: its code, and links to papers."""
    text = text.replace("``", "`")
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def filled(text: str, indent: str = "") -> str:
    """Fill one paragraph of lines that fit, none of which begins like a list or a heading."""
    kept = re.sub(r" (?=([-+*>#]|\d+\.)( |$))", "\0", " ".join(text.split()))
    lines = textwrap.wrap(
        kept, 116, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def fenced(lines: Sequence[str]) -> str:
    return "\n".join(["```text", *(broken(line) for line in lines), "```"])


def broken(line: str) -> str:
    """Break a signature over several lines if it is wider than a page of the documentation."""
    if len(line) <= 80:
        return line
    head, _, rest = line.partition("(")
    inside, bracket, returned = (
        rest.rpartition(") -> ") if ") -> " in rest else (rest[:-1], ")", "")
    )
    parameters = re.split(r", (?=[\w*]+(?:[:=,]|$))", inside)
    return "\n".join(
        [f"{head}(", *(f"    {parameter}," for parameter in parameters), f"{bracket}{returned}"]
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '/') for cell in line)} |".replace("| --- ", "|---")
        for line in lines
    )
