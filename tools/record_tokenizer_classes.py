"""Record the tokenizer classes of transformers: ``python tools/record_tokenizer_classes.py``.

A row has the special tokens and the steps of a class. A checkpoint that names the class has both, whatever
``tokenizer.json`` says.
"""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from opgraft.serving.tokenizer_parts import parts_of, tokens_around
from opgraft.serving.tokenizer_settings import scheme_of
from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS
from transformers.models.auto import configuration_auto, tokenization_auto

REPOSITORY = Path(__file__).parents[1]
FILE = REPOSITORY / "core/serving/tokenizer_classes.json"
SETTINGS = ("do_lower_case", "add_prefix_space", "legacy")
"""Settings with a default that ``tokenizer.json`` may contradict."""

_CHARACTERS = "_spm_precompiled_charsmap"
_MARK = "\0mark"


def recorded() -> dict[str, dict[str, Any]]:
    """Return, by the name of a class, its special tokens, the model types that it is for, and its steps.

    Types without a class of their own for settings are left out, as transformers does not know them.
    ``always`` has the types for which transformers takes the class whatever a checkpoint says.
    """
    configs: Any = configuration_auto
    known_kinds = configs.CONFIG_MAPPING_NAMES
    found: dict[str, dict[str, Any]] = {}
    for kind, name in sorted(tokenization_auto.TOKENIZER_MAPPING_NAMES.items()):
        if name is None:
            continue
        row = found.setdefault(name, {"tokens": _tokens(name), "kinds": [], "always": []})
        if kind in known_kinds:
            row["kinds"].append(kind)
        if kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            row["always"].append(kind)
    for name in _other_names():
        found.setdefault(name, {"tokens": _tokens(name), "kinds": [], "always": []})
    for name, row in found.items():
        row.update(_steps(tokenization_auto.tokenizer_class_from_name(name)))
    return dict(sorted(found.items()))


def _other_names() -> list[str]:
    """Return the names of classes, or second names of them, that settings may have and no model type has."""
    names = []
    known = {name for name in dir(transformers) if name.endswith("Tokenizer")}
    for name in sorted(known | {*SLOW_TO_FAST_CONVERTERS}):
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedTokenizerFast):
            names.append(name)
    return names


def _steps(cls: Any) -> dict[str, Any]:
    """Return the steps that a class makes in place of those of ``tokenizer.json``, if it makes any.

    ``scheme`` tells before which pieces of a text the class puts a space, if the class decides that.
    ``around`` has the names of the tokens before and behind a text; it is missing if the class takes
    the tokens from ``tokenizer.json``. ``parts`` is missing if the class takes all other steps from
    there, and empty if they are unknown, or the class puts tokens around a text that have no name.
    """
    base = transformers.PreTrainedTokenizerFast
    if cls is None or not issubclass(cls, base) or cls is base:
        return {}
    made = made_by(cls)
    if made is None:  # it takes a vocabulary of another kind, so nobody knows its steps
        return {"parts": ""} if "__init__" in vars(cls) else {}
    names = {text: name for name, text in _named(cls).items()}
    around = tokens_around(made.backend_tokenizer)
    found: dict[str, Any] = {}
    if "__init__" in vars(cls):
        found = _parts(cls, made.backend_tokenizer)
    if [_MARK] in around:
        return found
    if not names.keys() >= {*around[0], *around[1]}:
        return {**found, "parts": ""}
    return {**found, "around": [[names[each] for each in tokens] for tokens in around]}


def _parts(cls: Any, backend: Any) -> dict[str, Any]:
    arguments = inspect.signature(cls.__init__).parameters
    takes_characters = _CHARACTERS in arguments
    defaults = {name: arguments[name].default for name in SETTINGS if name in arguments}
    scheme = scheme_of(backend)
    # The setting "legacy" decides in place of the class.
    is_fixed = scheme not in (None, "never") and "legacy" not in arguments
    fixed = {"scheme": scheme} if is_fixed else {}
    return {
        **fixed,
        "defaults": {name: value for name, value in defaults.items() if value is not None},
        "characters": takes_characters,
        "parts": parts_of(backend, without_characters=takes_characters),
    }


def _named(cls: Any) -> dict[str, str]:
    """Return a text of its own for each special token of a class."""
    for base in cls.__mro__:
        names = tokens_of(base)
        if names:
            return {name: f"<{name}>" for name in names}
    return {}


def made_by(cls: Any) -> Any:
    """Return a tokenizer of a class with a small vocabulary; ``None`` if the class takes none of three kinds.

    Each special token is its own name in angle brackets.
    """
    named = _named(cls)
    words = [*named.values(), _MARK, "<unk>", "\u2581", *"thecatsx"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    scored = [(word, -float(index)) for word, index in vocabulary.items()]
    mark = tokenizers.processors.TemplateProcessing(
        single=f"$A {_MARK}", special_tokens=[(_MARK, vocabulary[_MARK])]
    )
    for given in ({"vocab": vocabulary, "merges": []}, {"vocab": vocabulary}, {"vocab": scored}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = cls(**given, **named, post_processor=mark)
                made("the cat")
        except Exception:  # noqa: S112  # the class takes another kind of vocabulary
            continue
        return made
    return None


def _tokens(name: str) -> dict[str, str]:
    cls = tokenization_auto.tokenizer_class_from_name(name)
    if cls is None:  # of a library that is not installed
        return {}
    for base in cls.__mro__:  # a constructor may hand its arguments on
        tokens = tokens_of(base)
        if tokens:
            return tokens
    return {}


def tokens_of(cls: Any) -> dict[str, str]:
    """Return the special tokens among the defaults of a constructor."""
    tokens = {}
    for argument, parameter in inspect.signature(cls.__init__).parameters.items():
        if argument.endswith("_token") and isinstance(parameter.default, str):
            tokens[argument] = parameter.default
    return tokens


def written(classes: dict[str, dict[str, Any]]) -> str:
    """Return the text of the file, with a line for each class."""
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in classes.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main() -> None:
    classes = recorded()
    FILE.write_text(written(classes), encoding="utf-8")
    print(f"{len(classes)} classes, written to {FILE.name}")


if __name__ == "__main__":
    main()
