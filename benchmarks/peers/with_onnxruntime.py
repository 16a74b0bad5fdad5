"""ONNX Runtime GenAI's engine, which takes all requests of its batch a step at a time."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import numpy
from convert import BATCH
from protocol import Answer, Generate, serve

genai: Any = importlib.import_module("onnxruntime_genai")


def start(checkpoint: str, dtype: str) -> Generate:
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config = genai.Config(checkpoint)
    config.overlay(json.dumps({"model": {"decoder": options}}))
    engine = genai.Engine(genai.Model(config))
    events = engine.create_event_buffer(BATCH)

    def asked(prompt: list[int], max_tokens: int) -> Any:
        options = genai.RequestOptions()
        options.set_max_session_tokens(len(prompt) + max_tokens)
        request = engine.create_request(options=options)
        turn = genai.TurnOptions(request)
        turn.set_do_sample(False)
        turn.set_min_generated_tokens(max_tokens)
        turn.set_max_generated_tokens(max_tokens)
        request.begin_turn(numpy.array(prompt, dtype=numpy.int32), turn)
        return request

    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        requests = [asked(prompt, max_tokens) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.has_pending_requests():
            for event in engine.run(events):
                if event.flags & genai.EngineEventFlags.TOKEN:
                    tokens[requests.index(event.request)].append(event.token)
        for request in requests:
            request.close()
        return {"tokens": tokens}

    return generate


if __name__ == "__main__":
    serve(start, "onnxruntime-genai")
