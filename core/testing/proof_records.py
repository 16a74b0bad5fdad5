"""Records of what was proved of each functional form, as a file in the folder of its family.

A file has no dates and no names of machines. Each record holds a digest of the source that was proved, so that
anybody can tell whether it is about what is installed. ``make prove`` renews it.
"""

from __future__ import annotations

import enum
import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opgraft import functional as _functional  # noqa: F401  # registers every form
from opgraft.binding.functional import FUNCTIONALS
from opgraft.testing.sources import digest_of

PROVIDER = "opgraft"
SCHEMA = "opgraft.proofs/1"
FILE = "proof.json"
"""The name of the file in each family's folder that holds the records of its forms."""


@dataclass(frozen=True)
class Record:
    """The record of what was proved of one form.

    Attributes:
        sources: the modules with the native definition and with the spec.
        digest: of their source and of what they are made of, as it was proved.
        checks: the names of the checks that passed, all of them in every variant.
        variants: how many settings of its arguments the form was checked under.
        dtypes: of the inputs.
        outside: what others' implementations are called that computed the same.
    """

    sources: tuple[str, ...]
    digest: str
    checks: tuple[str, ...]
    variants: int
    dtypes: tuple[str, ...]
    outside: tuple[str, ...]


class State(enum.Enum):
    """The verdict of its record on a form as it is installed."""

    CURRENT = "current"
    CHANGED = "changed since it was checked"
    MISSING = "not checked"


def read(file: Path) -> dict[str, Record]:
    """Read the records in a file, by the name of the form; none where there is no file."""
    text = file.read_text(encoding="utf-8") if file.is_file() else '{"forms": {}}'
    return {name: _record(row) for name, row in json.loads(text)["forms"].items()}


def written(records: Mapping[str, Record]) -> str:
    """Return the text of the file that holds ``records``: a line per form, in the order of their names."""
    rows = [
        f"    {json.dumps(name)}: {json.dumps(asdict(records[name]))}" for name in sorted(records)
    ]
    head = (
        f'  "schema": {json.dumps(SCHEMA)},\n  "provider": {json.dumps(PROVIDER)},\n  "forms": {{\n'
    )
    return "{\n" + head + ",\n".join(rows) + "\n  }\n}\n"


@functools.cache
def recorded() -> Mapping[str, Record]:
    """Return the records of this installation."""
    modules = {form.native.__module__ for form in FUNCTIONALS.values()}
    files = {file_of(module) for module in modules if module.startswith("opgraft.")}
    return {name: record for file in files for name, record in read(file).items()}


def file_of(module: str) -> Path:
    """Return the file with the records of the forms that a module defines, or whose specs it holds."""
    return Path(str(sys.modules[module].__file__)).with_name(FILE)


def state_of(form: str) -> State:
    """Tell whether the form was checked as it is installed here."""
    record = recorded().get(form)
    if record is None:
        return State.MISSING
    return State.CURRENT if digest_of(record.sources) == record.digest else State.CHANGED


def _record(row: Mapping[str, Any]) -> Record:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    return Record(**fields)
