"""Make checkpoints and expected outputs of the bundle: ``python -m on_gpu.bundle FOLDER``, for ``make gpu-bundle``."""

from __future__ import annotations

import sys
from pathlib import Path

from on_gpu import checkpoints, expected
from on_gpu.engines import answers, engine

LARGEST = 45 * 10**6
"""Bytes of the bundle, at most: it travels to the machine together with the checkout."""


def main(folder: Path) -> None:
    checkpoints.write_language_model(folder / expected.LANGUAGE_MODEL)
    checkpoints.write_encoder(folder / expected.ENCODER)
    outputs = expected.compute(folder)
    _expect_same_tokens(folder, outputs)
    outputs.write(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB")
    if size > LARGEST:
        sys.exit(f"the bundle may have {LARGEST / 1e6:.0f} MB: keep fewer layers or words")


def _expect_same_tokens(folder: Path, outputs: expected.Expected) -> None:
    """Raise if the engine of opgraft gives other tokens here: its numbers on a GPU would say nothing."""
    with engine(folder) as llm:
        found_tokens = answers(llm, outputs.prompts)
    for prompt, found, tokens in zip(expected.PROMPTS, found_tokens, outputs.tokens, strict=True):
        if found != tokens:
            sys.exit(f"after {prompt[:40]!r} the engine gives {found}, transformers {tokens}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
