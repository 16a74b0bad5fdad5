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


def checked_template(file: str | None) -> str | None:
    """Return the template of a file, or None if there is no file.

    The file is read once, so that the checked template is the one in use.

    Raises:
        ConfigError: the file cannot be read, is no regular file, or is no template. The message has
            the line.
        ChildError: the process that reads templates could not be started.
    """
    if file is None:
        return None
    source = _read_source(file)
    # Templates are compiled in the helper alone, within its limits.
    kind, text = TemplateRenderer().render(source, {})
    # Without messages, most templates refuse to render.
    if kind is AnswerKind.INVALID:
        raise ConfigError(f"{_SETTING}, {file}{text}. Correct the file, or leave the setting out.")
    return source


def with_template(tokenizer: Tokenizer, file: str | None, source: str | None) -> Tokenizer:
    """Return a tokenizer with the template of a file, or the same tokenizer if there is no file.

    Args:
        tokenizer: of the checkpoint.
        file: the file of the template, for errors.
        source: the template, from ``checked_template``.
    """
    if source is None:
        return tokenizer
    return replace(tokenizer, chat_templates={"default": source}, template_file=file)


def _read_source(file: str) -> str:
    try:
        source = read_regular(file, _LARGEST).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_SETTING}, {file}, cannot be read: {described(error)}") from error
    if not source.strip():
        raise ConfigError(
            f"{_SETTING}, {file}, is empty: write a template, or leave the setting out"
        )
    return source
