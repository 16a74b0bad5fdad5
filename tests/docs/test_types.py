"""The examples that users copy are typed as strictly as the code."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GUIDES = [
    "how-to/build-a-model",
    "how-to/implement-an-op",
    "how-to/replace-an-op",
    "how-to/device-plugin",
    "reference/hooks",
]


CACHE = REPOSITORY / ".mypy_cache" / "docs"


@pytest.fixture
def workplace() -> Iterator[Path]:
    """An empty folder, always the same, because mypy finds again only what it has checked in the same place."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the tests may be there
        folder = CACHE / "workplace"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder


@pytest.fixture
def importable(workplace: Path) -> Path:
    """A folder of links from which type checkers read opgraft, however it is installed."""
    package = workplace / "path" / "opgraft"
    package.mkdir(parents=True)
    for source in [*(REPOSITORY / "core").iterdir(), REPOSITORY / "platforms", REPOSITORY / "plugins"]:
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    return package.parent


@pytest.mark.slow
def test_the_examples_of_the_guides_are_typed(workplace: Path, importable: Path, blocks_of) -> None:
    """mypy --strict has nothing to say about the Python of the guides: each page as a module, each file as itself."""
    examples = workplace / "examples"
    examples.mkdir()
    for guide in GUIDES:
        module: list[str] = []
        for block in blocks_of(REPOSITORY / "docs" / f"{guide}.md"):
            if block.language == "python" and block.title:
                target = examples / Path(block.title.removeprefix("reference_plugins/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                module.append(block.text)
        (examples / f"{re.sub('[-/]', '_', guide)}.py").write_text("\n\n".join(module), encoding="utf-8")
    roots = [examples / "acme-ops", examples / "acme-kit", examples / "opgraft-toy-npu" / "src"]
    variables = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, [importable, *roots]))}
    options = ["--strict", "--follow-imports=silent", "--explicit-package-bases"]
    cache = ["--cache-dir", str(CACHE)]
    command = [sys.executable, "-m", "mypy", *options, *cache, *map(str, examples.rglob("*.py"))]
    result = subprocess.run(command, cwd=examples, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
