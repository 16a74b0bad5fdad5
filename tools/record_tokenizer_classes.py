"""Record the special tokens that tokenizer classes of transformers have: ``python tools/record_tokenizer_classes.py``.

A checkpoint whose settings leave such a token out has the token all the same.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from transformers.models.auto import configuration_auto, tokenization_auto

REPOSITORY = Path(__file__).parents[1]
FILE = REPOSITORY / "core/serving/tokenizer_classes.json"


def recorded() -> dict[str, dict[str, Any]]:
    """Return, by the name of a class, its special tokens and the model types that it is for.

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
    return dict(sorted(found.items()))


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
