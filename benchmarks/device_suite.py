"""Sum up the answers of the device suite by part.

``make test-device-suite`` and ``make test-openreg`` run this program.

Exit code 1: a test failed that is no failure in the former summary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timing import machine, this_run

STATUSES = ("passed", "failed", "skipped")
LONGEST = 160
"""Characters of a reason."""


def summed(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score and the failures of the device suite, and the counts of each part.

    Args:
        evidence: what ``opgraft conformance --device-suite --json`` writes.
    """
    answers = [each for each in evidence["outcomes"] if each["op"] == "(device)"]
    suite = evidence["device_suite"]
    parts = []
    asked = (
        f"opgraft conformance {evidence['plugin']} --device-suite --suite-level {suite['level']}"
    )
    for part, left_out in suite["left_out"].items():
        counts = Counter(each["status"] for each in answers if each["check"].startswith(part))
        row = {status: counts[status] for status in STATUSES}
        parts.append({"part": part, **row, "left_out": sum(left_out.values())})
    failed = [each for each in answers if each["status"] == "failed"]
    return {
        "machine": machine(),
        **this_run(),
        "command": asked + "".join(f" --suite-part {part}" for part in suite["left_out"]),
        "date": evidence["date"],
        "device": evidence["device"],
        "versions": evidence["versions"],
        "suite": suite,
        "parts": parts,
        "failed": {each["check"]: each["reason"][:LONGEST] for each in failed},
    }


def main() -> int:
    """Write the summary, print the score and new failures, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="the summary, former and new")
    given = parser.parse_args()
    known = json.loads(given.json.read_text())["failed"] if given.json.exists() else {}
    summary = summed(json.loads(given.evidence.read_text()))
    given.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"score {summary['suite']['score']:.1%}, {len(summary['failed'])} tests failed")
    new = {check: reason for check, reason in summary["failed"].items() if check not in known}
    for check, reason in new.items():
        print(f"new: {check}: {reason}")
    return 1 if known and new else 0


if __name__ == "__main__":
    sys.exit(main())
