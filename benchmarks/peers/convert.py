"""Write a checkpoint of transformers in the format of an engine: ``convert.py FORMAT SOURCE TARGET DTYPE``.

It runs in the engine's environment, apart from the engine: conversion takes torch, whose memory and time the engine is
not to be charged with.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NEVER_CHOSEN = 16
"""A token that SmolLM2 was not trained to give: the end of text, where an engine must have one."""

BATCH = 64
"""Requests that ONNX Runtime GenAI computes at once; it says 4 unless its configuration says more."""


def openvino(source: str, target: str, dtype: str) -> None:
    """Export with optimum-intel; weights keep their values in float32, and the engine computes in its dtype."""
    exporters = importlib.import_module("optimum.exporters.openvino")
    config = importlib.import_module("optimum.intel").OVConfig(dtype="fp32")
    task = "text-generation-with-past"
    exporters.main_export(source, target, task=task, ov_config=config, convert_tokenizer=False)


def ctranslate2(source: str, target: str, dtype: str) -> None:
    """Convert with CTranslate2's own converter."""
    converters = importlib.import_module("ctranslate2.converters")
    converters.TransformersConverter(source).convert(target, quantization=dtype)


def onnxruntime(source: str, target: str, dtype: str) -> None:
    """Build with the builder of ONNX Runtime GenAI."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    paths = ["-m", source, "-o", target, "-c", str(Path(target, "cache"))]
    precision = {"float32": "fp32"}[dtype]
    subprocess.run([*builder, *paths, "-p", precision, "-e", "cpu"], check=True)
    file = Path(target, "genai_config.json")
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model"]["eos_token_id"] = NEVER_CHOSEN
    config["engine"] = {"static_batching": {"max_batch_size": BATCH}}
    file.write_text(json.dumps(config), encoding="utf-8")


FORMATS: dict[str, Callable[[str, str, str], None]] = {
    "openvino": openvino,
    "ctranslate2": ctranslate2,
    "onnxruntime": onnxruntime,
}

if __name__ == "__main__":
    FORMATS[sys.argv[1]](*sys.argv[2:])
