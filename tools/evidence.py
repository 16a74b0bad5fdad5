"""Prove functional forms and write down what was proved: ``python tools/evidence.py [FORM ...]``, all without names.

Nothing is written if a check fails. Only native definitions are proved, and no plugin is loaded, so that the file is
the same on every machine.
"""

from __future__ import annotations

import sys

from opgraft.config import OpgraftConfig, set_config
from opgraft.testing import evidence
from opgraft.testing.catalogue import FAMILIES
from opgraft.testing.proof import prove


def main(names: list[str]) -> None:
    specs = {spec.form.name: (spec, family) for family in FAMILIES for spec in family.SPECS}
    unknown = sorted(set(names) - set(specs))
    if unknown:
        sys.exit(f"no functional form is called {', '.join(unknown)}; there are: {', '.join(sorted(specs))}")
    known = evidence.read(evidence.FILE.read_text(encoding="utf-8")) if names else {}
    records = {name: record for name, record in known.items() if name in specs}
    with set_config(OpgraftConfig(plugins=())):
        for name in names or specs:
            print(name, flush=True)
            records[name] = prove(*specs[name])
    evidence.FILE.write_text(evidence.written(records), encoding="utf-8")
    print(f"{len(names or specs)} of {len(specs)} forms proved, written to {evidence.FILE}")


if __name__ == "__main__":
    main(sys.argv[1:])
