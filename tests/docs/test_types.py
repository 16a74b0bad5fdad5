"""The examples that users copy are typed as strictly as the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GUIDES = [
    "how-to/write-a-model",
    "how-to/implement-an-op",
    "how-to/replace-an-op",
    "how-to/device-plugin",
    "reference/hooks",
]


# That of 'make check', which has read opgraft and torch: each guide takes a second then.
CACHE = REPOSITORY / ".mypy_cache"
PORTED = """
from opgraft.custom_op import op_registry
from opgraft.logger import init_logger
from opgraft.torch_library import direct_register_custom_op

logger = init_logger(__name__)
logger.info("%s %s", op_registry, direct_register_custom_op)
"""
"""Names that a ported plugin imports."""


@pytest.mark.types
def test_the_examples_of_the_guides_are_typed(tmp_path: Path, blocks_of) -> None:
    """mypy --strict has nothing to say about the Python of the guides: each page as a module, each file as itself."""
    examples = tmp_path / "examples"
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
        (examples / f"{re.sub('[-/]', '_', guide)}.py").write_text(
            "\n\n".join(module), encoding="utf-8"
        )
    (examples / "ported.py").write_text(PORTED, encoding="utf-8")
    for file in (REPOSITORY / "reference_plugins/opgraft-toy-npu").glob(
        "src/*/*.py"
    ):  # those that no guide shows
        target = examples / file.relative_to(REPOSITORY / "reference_plugins")
        if not target.exists():
            shutil.copy(file, target)
    roots = [examples / "acme-ops", examples / "acme-kit", examples / "opgraft-toy-npu" / "src"]
    variables = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, roots))}
    options = ["--config-file", str(REPOSITORY / "pyproject.toml"), "--explicit-package-bases"]
    # A config of transformers has constructors without types.
    options += ["--untyped-calls-exclude", "transformers"]
    command = [
        sys.executable,
        "-m",
        "mypy",
        *options,
        "--cache-dir",
        str(CACHE),
        *map(str, examples.rglob("*.py")),
    ]
    result = subprocess.run(
        command, cwd=examples, env=variables, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
