"""What was proved of each functional form, as a file that is part of the package.

The file has no dates and no names of machines. Each record holds a digest of the source that was proved, so that
anybody can tell whether it is about what is installed. ``make evidence`` renews it.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opgraft.testing.sources import digest_of

PROVIDER = "opgraft"
SCHEMA = "opgraft.evidence/1"
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Record:
    """What was proved of one form.

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
    """What the evidence says about a form as it is installed."""

    CURRENT = "current"
    CHANGED = "changed since it was checked"
    MISSING = "not checked"


def read(text: str) -> dict[str, Record]:
    """The records in the text of the file, by the name of the form."""
    return {name: _record(row) for name, row in json.loads(text)["forms"].items()}


def written(records: Mapping[str, Record]) -> str:
    """The text of the file that holds ``records``: a line per form, in the order of their names."""
    rows = [f"    {json.dumps(name)}: {json.dumps(asdict(records[name]))}" for name in sorted(records)]
    head = f'  "schema": {json.dumps(SCHEMA)},\n  "provider": {json.dumps(PROVIDER)},\n  "forms": {{\n'
    return "{\n" + head + ",\n".join(rows) + "\n  }\n}\n"


@functools.cache
def recorded() -> Mapping[str, Record]:
    """The records of this installation."""
    return read(FILE.read_text(encoding="utf-8"))


def state_of(form: str) -> State:
    """Whether the form was checked as it is installed here."""
    record = recorded().get(form)
    if record is None:
        return State.MISSING
    return State.CURRENT if digest_of(record.sources) == record.digest else State.CHANGED


def _record(row: Mapping[str, Any]) -> Record:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Record(**fields)
