"""Record the calls that opgraft makes of its own classes: ``python tools/record_calls.py``.

Registration compares replacements with these calls. No plugin is loaded, so the file is the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))  # whose small models make the calls

from opgraft import OpgraftConfig, set_config  # noqa: E402  # after the path
from opgraft.registry import recorded_calls  # noqa: E402
from support.recording import record_all  # noqa: E402


def main() -> None:
    with set_config(OpgraftConfig(plugins=())):
        calls = record_all()
    file = REPOSITORY / "core/registry/recorded_calls.json"
    file.write_text(recorded_calls.written(calls), encoding="utf-8")
    print(f"{sum(map(len, calls.values()))} calls of {len(calls)} methods, written to {file.name}")


if __name__ == "__main__":
    main()
