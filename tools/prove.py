"""Prove functional forms and write down what was proved: ``python tools/prove.py [FORM ...]``, all without names.

Nothing is written of a family if a check fails. Only native definitions are proved, and no plugin is loaded, so that
the files are the same on every machine.
"""

from __future__ import annotations

import sys
from types import ModuleType

from opgraft.config import OpgraftConfig, set_config
from opgraft.testing import proof_records
from opgraft.testing.catalogue import FAMILIES, SPECS
from opgraft.testing.proof import prove


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(SPECS))
    if unknown:
        sys.exit(
            f"no functional form is called {', '.join(unknown)}; there are: {', '.join(sorted(SPECS))}"
        )
    with set_config(OpgraftConfig(plugins=())):
        for family in FAMILIES:
            renew(family, set(names or SPECS))
    print(
        f"{len(names or SPECS)} of {len(SPECS)} forms proved, written to {proof_records.FILE} beside their specs"
    )


def renew(family: ModuleType, names: set[str]) -> None:
    """Prove the forms of a family that are among ``names``, and write its file anew."""
    file, specs = (
        proof_records.file_of(family.__name__),
        {spec.functional.name: spec for spec in family.SPECS},
    )
    records = {name: record for name, record in proof_records.read(file).items() if name in specs}
    for name in sorted(names & set(specs)):
        print(name, flush=True)
        records[name] = prove(specs[name], family.__name__)
    file.write_text(proof_records.written(records), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
