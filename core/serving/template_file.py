"""The chat template of ``model.chat_template``: a file in place of the checkpoint's templates."""

from __future__ import annotations

from dataclasses import replace

from opgraft.base.files import read_regular
from opgraft.base.text import described
from opgraft.errors import ConfigError
from opgraft.serving.template_answer import AnswerKind
from opgraft.serving.template_renderer import TemplateRenderer
from opgraft.serving.tokenizer import Tokenizer

_SETTING = "model.chat_template"
_LARGEST = 1 << 20  # bytes


def expect_template(file: str | None) -> None:
    """Check a file, before a model is loaded.

    Raises:
        ConfigError: the file cannot be read, is no regular file, or is no template. The message has the line.
        ChildError: the process that reads templates could not be started.
    """
    if file is None:
        return
    # Templates are compiled in the helper alone, within its limits.
    kind, text = TemplateRenderer().render(_read(file), {})
    # Without messages, most templates refuse to render.
    if kind is AnswerKind.INVALID:
        raise ConfigError(f"{_SETTING}, {file}{text}. Correct the file, or leave the setting out.")


def with_template(tokenizer: Tokenizer, file: str | None) -> Tokenizer:
    """Return a tokenizer with the template of a file, or the same tokenizer if there is no file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is None:
        return tokenizer
    return replace(tokenizer, chat_templates={"default": _read(file)}, template_file=file)


def _read(file: str) -> str:
    try:
        source = read_regular(file, _LARGEST).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_SETTING}, {file}, cannot be read: {described(error)}") from error
    if not source.strip():
        raise ConfigError(
            f"{_SETTING}, {file}, is empty: write a template, or leave the setting out"
        )
    return source
