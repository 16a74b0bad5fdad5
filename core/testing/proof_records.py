"""Records of the proofs of functional forms, as a file in the folder of each family.

A file has no dates and no names of machines. Each record holds a digest of the proved source, for
a comparison with the installed source. ``make prove`` renews the files.
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
"""The name of the file with records in each family's folder."""


@dataclass(frozen=True)
class ProofRecord:
    """The record of the proof of one form.

    Attributes:
        sources: the modules with the native definition and with the spec.
        digest: of the proved source of these modules and of their imports.
        checks: the names of the passed checks, all of them in every variant.
        variants: the number of variants of the arguments.
        dtypes: of the inputs.
        outside: the names of other projects' implementations with the same results.
    """

    sources: tuple[str, ...]
    digest: str
    checks: tuple[str, ...]
    variants: int
    dtypes: tuple[str, ...]
    outside: tuple[str, ...]


class State(enum.Enum):
    """The verdict of a record on the installed form."""

    CURRENT = "current"
    CHANGED = "changed since it was checked"
    MISSING = "not checked"


def read(file: Path) -> dict[str, ProofRecord]:
    """Read the records in a file, by the name of the form; none without a file."""
    if not file.is_file():
        return {}
    forms = json.loads(file.read_text(encoding="utf-8"))["forms"]
    return {name: _record(row) for name, row in forms.items()}


def written(records: Mapping[str, ProofRecord]) -> str:
    """Return the text of a file with records: a line per form, in the order of the names."""
    # One line for each form: to renew one form changes one line.
    rows = []
    for name in sorted(records):
        rows.append(f"    {json.dumps(name)}: {json.dumps(asdict(records[name]))}")
    lines = [
        "{",
        f'  "schema": {json.dumps(SCHEMA)},',
        f'  "provider": {json.dumps(PROVIDER)},',
        '  "forms": {',
        ",\n".join(rows),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def recorded() -> Mapping[str, ProofRecord]:
    """Return the records of this installation."""
    modules = {form.native.__module__ for form in FUNCTIONALS.values()}
    # Forms of plugins have no records here.
    files = {file_of(module) for module in modules if module.startswith("opgraft.")}
    found: dict[str, ProofRecord] = {}
    for file in files:
        found |= read(file)
    return found


def file_of(module: str) -> Path:
    """Return the file with records beside a module of forms or specs."""
    return Path(str(sys.modules[module].__file__)).with_name(FILE)


def state_of(form: str) -> State:
    """Compare the record of a form with the installed source."""
    record = recorded().get(form)
    # A form of a plugin has no record.
    if record is None:
        return State.MISSING
    is_current = digest_of(record.sources) == record.digest
    return State.CURRENT if is_current else State.CHANGED


def _record(row: Mapping[str, Any]) -> ProofRecord:
    fields: dict[str, Any] = dict(row)
    for key, value in row.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    return ProofRecord(**fields)
