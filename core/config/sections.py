"""The settings of models, engines and the server.

The annotation of a field is the type in a resolved config. In a layer, ``None`` means "not set".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from opgraft.config.declaration import Section, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHORT_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model, with precision and length of the context."""

    section: ClassVar[str] = "model"

    name: str | None = setting(
        "the checkpoint: a folder, a file, or the name of a packaged model", unset="none"
    )
    dtype: str = setting(
        "dtype of weights and activations; auto takes the checkpoint's",
        default="auto",
        choices=DTYPES,
        instead=_SHORT_DTYPES,
    )
    max_model_len: int | None = setting(
        "longest context in tokens, at most the model's own",
        minimum=1,
        unset="the checkpoint's",
    )
    seed: int = setting("seed of random numbers", default=0, minimum=0, maximum=2**63 - 1)
    implementation: str = setting(
        "the definition of the model to run; auto takes opgraft's if one exists",
        default="auto",
        choices=("auto", "opgraft", "transformers"),
    )
    batch_invariant: bool = setting(
        "compute each token with the same bits in every batch; takes longer, and on CPUs needs "
        "the kernels of opgraft-cpu-kernels",
        default=False,
    )
    part: str | None = setting(
        "part of the checkpoint that is the model, by its name in the config, such as text_config",
        unset="the whole",
    )
    chat_template: str | None = setting(
        "file of a chat template in Jinja, in place of the checkpoint's templates",
        unset="the checkpoint's",
    )
    chat_format: str = setting(
        "how chats are written and answers read: by the chat template, or by a library of the "
        "model's makers; auto takes the library for models of its family, if the library and its "
        "vocabulary are there",
        default="auto",
        choices=("auto", "template", "harmony", "mistral"),
    )
    vocabulary_folder: str | None = setting(
        "folder with the vocabulary of the library: o200k_base.tiktoken for harmony, tekken.json "
        "or tokenizer.model.v3 for mistral",
        unset="the checkpoint's",
    )
    generation_config: str = setting(
        "defaults of sampling: auto takes those in the checkpoint's generation_config.json, none "
        "leaves them out",
        default="auto",
        choices=("auto", "none"),
        instead={"vllm": "none, which leaves the checkpoint's defaults out"},
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """The cache of keys and values."""

    section: ClassVar[str] = "cache"

    block_size: int = setting("tokens in a block of the cache", default=32, minimum=1)
    # Other programs need the memory of a host, and mostly not that of a device.
    memory_share: float | None = setting(
        "share of the free memory that the cache takes",
        above=0,
        maximum=1,
        unset="0.9 of a device's, 0.25 of a host's",
    )
    memory_bytes: int | None = setting(
        "bytes that the cache takes, instead of a share", minimum=1, unset="the share"
    )
    num_blocks: int | None = setting(
        "blocks of the cache, instead of memory_bytes", minimum=1, unset="as memory allows"
    )
    dtype: str = setting(
        "dtype of the cache; auto takes the model's, fp8 and int8 have a scale for each token and "
        "head",
        default="auto",
        choices=(*DTYPES, "fp8", "int8"),
        instead={
            **_SHORT_DTYPES,
            "fp8_e4m3": "fp8, which is e4m3",
            "fp8_e5m2": (
                "fp8, whose e4m3 is more precise: each row's scale gives it the range that e5m2 "
                "is for"
            ),
        },
    )
    prefix_reuse: bool = setting("reuse blocks of prompts that begin alike", default=True)
    store: str | None = setting(
        "folder, or URL of fsspec, that keeps full blocks for later processes and beyond the room "
        "of the cache",
        unset="blocks end with the process",
    )
    store_bytes: int = setting(
        "bytes that the store takes; the least recently used blocks go first",
        default=1 << 34,
        minimum=1,
    )
    store_key: str | None = setting(
        "file with the key that signs the blocks of the store",
        unset="one that is made in the user's folder for caches",
    )
    num_states: int | None = setting(
        "states of sequences in the cache, for models whose layers have states",
        minimum=1,
        unset="two for each running request, as memory allows",
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Section):
    """The choice of requests for a step."""

    section: ClassVar[str] = "scheduler"

    max_num_seqs: int = setting("requests that run at once, at most", default=256, minimum=1)
    max_num_batched_tokens: int = setting("tokens of a step, at most", default=2048, minimum=1)
    chunked_prefill: bool = setting(
        "process long prompts in chunks beside other requests", default=True
    )
    long_prefill_token_threshold: int | None = setting(
        "prompts of more tokens leave room in a step for shorter requests; 0: they take all",
        unset="a quarter of max_num_batched_tokens",
        minimum=0,
    )
    policy: str = setting(
        "order of requests: first come, first served, or by the priority of each",
        default="fcfs",
        choices=("fcfs", "priority"),
    )
    on_step_error: str = setting(
        "an error in the middle of a step ends the requests of the step, or stops the engine",
        default="fail_requests",
        choices=("fail_requests", "stop"),
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Section):
    """Drafts of the next tokens, which one step verifies together."""

    section: ClassVar[str] = "speculation"

    method: str | None = setting(
        "draft tokens that followed the same tokens before: in the request's own prompt and "
        "answer, or also in recent answers to requests of the same cache salt",
        choices=("ngram", "suffix"),
        unset="no drafts",
    )
    max_tokens: int = setting(
        "drafted tokens for a request in a step, at most", default=8, minimum=1
    )
    adaptive: bool = setting(
        "choose the number of drafted tokens by the accepted tokens and the time of steps",
        default=True,
    )
    remembered_tokens: int = setting(
        "tokens of answers that the method suffix remembers, of all cache salts together, at most",
        default=1 << 16,
        minimum=1,
    )
    exact: bool = setting(
        "tokens and log-probabilities have the same bits as without drafts; needs "
        "model.batch_invariant",
        default=True,
    )


@dataclass(frozen=True, kw_only=True)
class HandoverConfig(Section):
    """Long prompts that a second process computes, and hands over as blocks of the cache.

    Attributes:
        part: "computes" in the second process, "takes" in an engine whose store has no other use.
            No setting: the engine assigns the parts, and a merge of layers drops them.
    """

    section: ClassVar[str] = "handover"

    tokens: int | None = setting(
        "prompts with at least so many tokens that are neither in the cache nor stored are computed"
        " by a second process, beside the steps of the engine",
        minimum=1,
        unset="no second process",
    )
    seconds: float = setting(
        "seconds that a request waits for the second process, at most; then the engine computes "
        "the tokens that are left",
        default=30,
        above=0,
    )
    exact: bool = setting(
        "tokens and log-probabilities have the same bits as in one process; needs "
        "model.batch_invariant",
        default=True,
    )
    part: str = field(default="", repr=False)

    @property
    def store_setting(self) -> str:
        """The setting that asks for a store of blocks."""
        return "cache.store" if self.tokens is None else "handover.tokens"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Section):
    """Adapters of requests."""

    section: ClassVar[str] = "lora"

    enabled: bool = setting("requests may name LoRA adapters", default=False)
    max_loras: int = setting(
        "adapters of the requests that run at once, at most", default=8, minimum=1
    )
    max_lora_rank: int = setting("rank of an adapter, at most", default=64, minimum=1)
    max_cpu_loras: int | None = setting(
        "adapters that stay in memory, at most, or one more while all of them run; others are "
        "read again when requests name them",
        minimum=1,
        unset="max_loras",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """The sizes of the groups that ranks form.

    Attributes:
        data_rank: the number of the engine's replica, below ``data``. No setting: the front end
            assigns numbers to engines, and a merge of layers drops this one.
        meeting: the path of the file for the meeting of ranks with shared experts. No setting.
    """

    section: ClassVar[str] = "parallel"

    tensor: int = setting("ranks that share each layer", default=1, minimum=1)
    pipeline: int = setting("ranks that share the stack of layers", default=1, minimum=1)
    stage_layers: Sequence[int] = setting(
        "number of layers of each rank of the pipeline, in order; if empty, layers are spread by"
        " the bytes of weights",
        default=(),
    )
    data: int = setting("replicas that share the requests", default=1, minimum=1)
    on_replica_loss: str = setting(
        "requests of a replica whose workers are lost fail, or move to another replica, which "
        "continues the answers",
        default="fail",
        choices=("fail", "move"),
    )
    least_replicas: int = setting(
        "replicas that must run or be starting again; with fewer, the engine stops",
        default=1,
        minimum=1,
    )
    expert: int = setting("ranks that share the experts of a layer", default=1, minimum=1)
    executor: str | None = setting(
        "where workers run: in this process, in a process for each rank, in the processes of a "
        "launcher such as torchrun, or on the hosts of a Ray cluster",
        choices=("in_process", "processes", "external", "ray"),
        unset="external under torchrun; processes if tensor, pipeline or data is above 1, or under "
        "opgraft serve; else in_process",
    )
    devices_per_rank: int = setting(
        "devices that each rank spreads its layers over, on platforms whose processes can have "
        "several",
        default=1,
        minimum=1,
    )
    start_seconds: float = setting(
        "seconds for each part of a worker's start, such as loading the model; then the worker "
        "counts as hanging, and is named and ended",
        default=1800,
        above=0,
    )
    step_seconds: float = setting(
        "seconds for a step; then the late ranks count as hanging, and are named and ended",
        default=300,
        above=0,
    )
    restart_workers: int = setting(
        "how often workers that ended or hang are started again; open requests fail, new ones "
        "are served",
        default=0,
        minimum=0,
    )
    ray_cpus: int = setting(
        "processors that Ray reserves for a worker, and the worker's threads", default=1, minimum=1
    )
    redundant_experts: int = setting(
        "places for additional copies of a layer's experts, on all ranks together",
        default=0,
        minimum=0,
    )
    expert_balance_steps: int | None = setting(
        "steps after which experts are placed again, by the number of tokens of each",
        minimum=1,
        unset="never",
    )
    expert_moves: int = setting(
        "experts that change places between two steps, at most", default=4, minimum=2
    )
    # Plain fields, as no user may set these.
    data_rank: int | None = field(default=None, repr=False)
    meeting: str | None = field(default=None, repr=False)

    @property
    def in_rounds(self) -> bool:
        """True if replicas share experts, and make steps together."""
        return self.data > 1 and self.expert > self.tensor


@dataclass(frozen=True, kw_only=True)
class LoadConfig(Section):
    """The loading of checkpoints."""

    section: ClassVar[str] = "load"

    format: str = setting(
        "format of the checkpoint; auto decides by the files",
        default="auto",
        choices=("auto", "safetensors", "gguf"),
    )
    device: str | None = setting("device for the weights", unset="the platform's")
    progress: bool = setting("show a progress bar on stderr", default=True)


@dataclass(frozen=True, kw_only=True)
class QuantizationSettings(Section):
    """The quantization of weights: for the whole model, and for parts by prefixes of names."""

    section: ClassVar[str] = "quantization"

    method: str | None = setting("name of a quantization method", unset="the checkpoint's")
    skip: Sequence[str] = setting(
        "prefixes, or patterns with *, of layers that are not quantized", default=()
    )
    by_prefix: Mapping[str, str] = setting(
        "quantization method by prefix or pattern of layers", default={}
    )


@dataclass(frozen=True, kw_only=True)
class ShadowConfig(Section):
    """Shadow mode: compare calls of kernels with native definitions."""

    section: ClassVar[str] = "shadow"

    # Off, as a compared call costs the time of both.
    share: float = setting(
        "share of each kernel's calls that also run the op's native definition and compare the "
        "results",
        default=0,
        minimum=0,
        maximum=1,
    )
    first_call: bool = setting(
        "compare each kernel's first call with each combination of dtypes", default=False
    )
    demote: bool = setting("after a difference, the op runs its native definition", default=False)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Section):
    """The HTTP server: address, admission of clients, limits of requests."""

    section: ClassVar[str] = "server"

    # A server without keys must not answer other machines by default.
    host: str = setting(
        "address to listen on; 0.0.0.0 for all addresses of this machine", default="127.0.0.1"
    )
    port: int = setting(
        "port to listen on; 0 takes a free port", default=8000, minimum=0, maximum=65535
    )
    model_name: Sequence[str] = setting(
        "names of the model for clients; answers have the first. By default, the last part of "
        "MODEL",
        default=(),
    )
    api_key_file: str | None = setting(
        "file of API keys, one a line; clients must send one", unset="none"
    )
    allowed_hosts: Sequence[str] = setting(
        "host names, besides localhost, that requests may use for a server without keys on a "
        "local address",
        default=(),
    )
    cors_origins: Sequence[str] = setting(
        "origins whose pages may call the server from a browser", default=()
    )
    max_waiting_requests: int = setting(
        "sequences that wait for their first token, at most; further requests get the status 429",
        default=1024,
        minimum=1,
    )
    max_waiting_tokens: int = setting(
        "tokens of the prompts of waiting sequences, at most; further requests get the status 429",
        default=1 << 20,
        minimum=1,
    )
    max_connections: int = setting(
        "open connections, at most; further ones get the status 503",
        default=4096,
        minimum=1,
    )
    max_body_bytes: int = setting(
        "bytes of the body of a request, at most", default=4 << 20, minimum=1
    )
    max_total_body_bytes: int = setting(
        "bytes of the bodies of all open requests, at most; further requests get the status 429",
        default=64 << 20,
        minimum=1,
    )
    max_prompt_tokens: int | None = setting(
        "tokens of a prompt, at most", minimum=1, unset="as the context allows"
    )
    max_prompt_characters: int | None = setting(
        "characters of each prompt of a request, at most; longer ones are not tokenized",
        minimum=1,
        unset="64 for a token of the context",
    )
    max_output_tokens: int | None = setting(
        "tokens of all answers to a request together, at most",
        minimum=1,
        unset="the context for each",
    )
    max_answers: int = setting(
        "answers to a request, at most: its prompts times n", default=128, minimum=1
    )
    max_inputs: int = setting("texts in a request for embeddings, at most", default=2048, minimum=1)
    max_stops: int = setting(
        "strings or tokens that a request may list in each of stop, stop_token_ids and bad_words",
        default=64,
        minimum=0,
    )
    max_logit_bias: int = setting(
        "tokens that a request may list in logit_bias", default=300, minimum=0
    )
    max_logprobs: int = setting(
        "log-probabilities of a token that a request may ask for", default=20, minimum=0
    )
    max_total_logprobs: int = setting(
        "log-probabilities that a request may ask for in all: one and the likeliest for each "
        "token of answers and of echoed prompts",
        default=1 << 18,
        minimum=0,
    )
    lora_modules: Mapping[str, str] = setting(
        "adapters by their names for clients, as in sql=/adapters/sql; needs lora.enabled",
        default={},
    )
    # Off, as a client could make the server read any folder.
    lora_updates: bool = setting(
        "accept /v1/load_lora_adapter and /v1/unload_lora_adapter, by which clients name folders "
        "of this machine",
        default=False,
    )
    # Off, as a template is a program of the client.
    request_templates: bool = setting(
        "accept chat templates in requests, and render them in a process with limits",
        default=False,
    )
    max_kept_bytes: int = setting(
        "bytes of conversations of /v1/responses to keep for previous_response_id, at most; the "
        "oldest are removed first, and 0 keeps none",
        default=64 << 20,
        minimum=0,
    )
    # Clients that were written for another server send further fields with each request.
    unknown_fields: str = setting(
        "refuse requests with fields that this server does not know, or ignore the fields and "
        "name them in the header x-ignored-fields of the answer",
        default="ignore",
        choices=("ignore", "refuse"),
    )
    # Without these limits, a client that sends or reads slowly would hold a connection for ever.
    head_seconds: float = setting(
        "seconds for the head of a request to arrive", default=10, above=0
    )
    body_seconds: float = setting(
        "seconds for the body of a request to arrive", default=30, above=0
    )
    read_seconds: float = setting(
        "seconds until the connection of a client that has stopped reading is closed",
        default=60,
        above=0,
    )
    request_seconds: float | None = setting(
        "seconds until a request is aborted", above=0, unset="never"
    )
    # Longer than parallel.step_seconds, so that late ranks are named before the server ends.
    step_seconds: float = setting(
        "seconds for a step; then the engine counts as hanging, and the server ends with the "
        "exit code 5",
        default=600,
        above=0,
    )
    drain_seconds: float = setting(
        "seconds after a SIGTERM until running requests are aborted",
        default=30,
        minimum=0,
    )
    # If the server closes first, a proxy may send a request into the closed connection.
    keep_alive_seconds: float = setting(
        "seconds until an idle connection is closed; use more than a proxy in front",
        default=75,
        above=0,
    )
    otlp_endpoint: str | None = setting(
        "URL of a receiver of OTLP over HTTP, such as http://localhost:4318, for spans of requests "
        "and of the start; needs the extra otel",
        unset="no spans",
    )
    metrics_prefix: str = setting(
        "prefix of the names of metrics; under vllm, boards for vLLM show this server",
        default="opgraft",
        choices=("opgraft", "vllm"),
    )
    time_ops_every: int | None = setting(
        "each so many steps, one step tells the time of each op for the metrics; 0: none does",
        minimum=0,
        unset="256 in a server, 0 elsewhere",
    )
    # Prompts may be private, and logs are often kept elsewhere.
    log_prompts: bool = setting("write prompts and answers to the log", default=False)
