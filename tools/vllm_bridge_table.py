"""Write the table of vLLM's modules and names that the bridge answers into its README, from the code that answers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

BRIDGE = Path(__file__).parents[1] / "reference_plugins/opgraft-vllm-bridge"
PAGE = BRIDGE / "README.md"
_TABLE = re.compile(r"(?<=^\| module of vLLM \| names \|\n\|---\|---\|\n)(\|.*\n)*", re.M)


def main() -> None:
    # It is installed nowhere, as tests would see it in every process.
    sys.path.insert(0, str(BRIDGE / "src"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with the table as it must be."""
    from opgraft_vllm_bridge.names import NAMES

    rows = {
        module: " ".join(f"`{name}`" for name in sorted(names))
        for module, names in sorted(NAMES.items())
    }
    table = "".join(f"| `{module}` | {names} |\n" for module, names in rows.items())
    renewed, count = _TABLE.subn(lambda _: table, text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} tables with this head, and must have 1")
    return renewed


if __name__ == "__main__":
    main()
