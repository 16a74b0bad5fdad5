"""Count what ten public device plugins use of vLLM and how much of it the bridge answers, into the bridge's README.

Their wheels are unpacked in the user's cache and read: nothing of them is installed or run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import importlib_metadata

BRIDGE = Path(__file__).parents[1] / "reference_plugins/opgraft-vllm-bridge"
PAGE = BRIDGE / "README.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "opgraft/vllm-plugins"
PLUGINS = {
    "sendnn-inference": "2.6.3",
    "tpu-inference": "0.32.0",
    "vllm-ascend": "0.23.0",
    "vllm-kunlun": "0.11.1",
    "vllm-mblt": "0.8.0",
    "vllm-musa": "0.1.1",
    "vllm-rbln": "0.12.0",
    "vllm-spyre": "1.10.0",
    "vllm-spyre-next": "0.1.0",
    "vllm-swift": "0.3.2",
}
"""Names of distributions to the versions that are read."""
_TABLE = re.compile(
    r"(?<=^\| plugin \| uses \| answered \| platform \|\n\|---\|---\|---\|---\|\n)(\|.*\n)*", re.M
)
_PLATFORM = "vllm.platform_plugins"


def main() -> None:
    # It is installed nowhere, as tests would see it in every process.
    sys.path.insert(0, str(BRIDGE / "src"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with the table as it must be; fetch the wheels that are not there."""
    return _TABLE.sub(lambda _: "".join(_row(name, fetched(name)) for name in PLUGINS), text)


def fetched(name: str) -> Path:
    """Return the folder of a plugin's files."""
    folder = CACHE / f"{name}-{PLUGINS[name]}"
    if not folder.is_dir():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        platform = [
            "--python-version",
            "3.12",
            "--platform",
            "manylinux_2_34_x86_64",
            "--dest",
            str(CACHE),
        ]
        subprocess.run([*pip, *platform, f"{name}=={PLUGINS[name]}"], check=True)  # noqa: S603  # our own words
        (wheel,) = CACHE.glob(f"{name.replace('-', '_')}-{PLUGINS[name]}-*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
    return folder


def _row(name: str, folder: Path) -> str:
    from opgraft_vllm_bridge.judging import judge, lacking
    from opgraft_vllm_bridge.reading import sources_of

    (distribution,) = importlib_metadata.distributions(path=[str(folder)])
    sys.path.insert(0, str(folder))
    try:
        sources = sources_of(*_modules(folder))
        uses = {
            use.name: use
            for source in sources
            for uses in (source.uses, *source.bodies.values())
            for use in uses
        }
        answered = sum(lacking(use) is None for use in uses.values())
        told = "none"
        for point in distribution.entry_points.select(group=_PLATFORM):
            apart = {
                each.attr for each in distribution.entry_points if each.module == point.module
            } - {point.attr}
            first, *_ = [
                source for source in sources_of(point.module) if source.name == point.module
            ]
            classes = sorted(
                text.rpartition(".")[0] for text in first.texts if text.endswith("Platform")
            )
            missing = len(judge(point.module, *classes, apart=apart).missing)
            told = f"lacks {missing:,}" if missing else "loads"
    finally:
        sys.path.remove(str(folder))
    return f"| {name} {PLUGINS[name]} | {len(uses):,} | {answered:,} | {told} |\n"


def _modules(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        if "tests" not in parts and all(part.isidentifier() for part in parts):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    main()
