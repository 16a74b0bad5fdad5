"""OpenVINO GenAI's pipeline with continuous batching."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy
from protocol import Answer, Generate, serve

openvino: Any = importlib.import_module("openvino")
genai: Any = importlib.import_module("openvino_genai")

PRECISION = {"float32": "f32", "bfloat16": "bf16"}


def start(checkpoint: str, dtype: str) -> Generate:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 128
    scheduler.enable_prefix_caching = False
    precision = PRECISION[dtype]
    hints = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
    }
    pipeline = genai.ContinuousBatchingPipeline(checkpoint, scheduler, "CPU", hints)

    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [config] * len(prompts))
        return {"tokens": [result.m_generation_ids[0] for result in results]}

    return generate


if __name__ == "__main__":
    serve(start, "openvino-genai")
