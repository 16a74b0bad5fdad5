"""llama.cpp, or its fork ik_llama.cpp, through the C interface: all requests are sequences of one batch.

``BINDING`` names the Python module of the fork's C interface.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy
from protocol import Answer, Generate, serve

PACKAGES = {"llama_cpp": "llama_cpp_python", "ik_llama_cpp._ctypes_api": "ik-llama-cpp-python"}
BINDING = os.environ.get("BINDING", "llama_cpp")
IS_FORK = BINDING != "llama_cpp"
llama_cpp: Any = importlib.import_module(BINDING)

BATCH = 2048
SEQUENCES = 64
ROOM = 2560


class Context:
    """A context of llama.cpp, with one sequence per request.

    Args:
        model: of llama.cpp.
        sequences: requests at once.
    """

    def __init__(self, model: object, sequences: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = ROOM * (1 if sequences == 1 else 6)
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = int(
            os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)
        )
        if IS_FORK:
            # Its kernels of attention abort where a block of keys has none of a row's own sequence.
            params.flash_attn = sequences == 1
        else:
            params.kv_unified = True  # as the fork's is by itself
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def forget(self) -> None:
        if IS_FORK:
            llama_cpp.llama_kv_cache_clear(self.context)
            return
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def compute(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute rows of token, position, sequence and whether it is sampled; return the likeliest next tokens."""
        self.batch.n_tokens = len(rows)
        for index, (token, position, sequence, sampled) in enumerate(rows):
            self.batch.token[index], self.batch.pos[index] = token, position
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
            self.batch.logits[index] = sampled
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        chosen = {}
        for index, (_, _, sequence, sampled) in enumerate(rows):
            if sampled:
                logits = llama_cpp.llama_get_logits_ith(self.context, index)
                chosen[sequence] = int(
                    numpy.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()
                )
        return chosen


def start(checkpoint: str, dtype: str) -> Generate:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        checkpoint.encode(), llama_cpp.llama_model_default_params()
    )
    contexts: dict[int, Context] = {}

    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        size = 1 if len(prompts) == 1 else SEQUENCES
        context = contexts.get(size) or contexts.setdefault(size, Context(model, size))
        context.forget()
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for first in range(0, len(rows), BATCH):
            last.update(context.compute(rows[first : first + BATCH]))
        outputs = [[last[sequence]] for sequence in range(len(prompts))]
        for done in range(max_tokens - 1):
            step = [
                (tokens[-1], len(prompts[i]) + done, i, True) for i, tokens in enumerate(outputs)
            ]
            for sequence, token in context.compute(step).items():
                outputs[sequence].append(token)
        return {"tokens": outputs}

    return generate


if __name__ == "__main__":
    serve(start, PACKAGES[BINDING])
