"""Arguments of vLLM's engine, and the settings that stand for each here.

``LLM`` takes ``SHORT_NAMES`` as keyword arguments. Messages about other arguments, and about
options of vLLM's command line, name the setting to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from opgraft.config.compilation import CompilationConfig
from opgraft.config.declaration import values_of
from opgraft.config.whole import FIELDS
from opgraft.errors import ConfigError, close_matches

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "dtype": "model.dtype",
        "max_model_len": "model.max_model_len",
        "seed": "model.seed",
        "quantization": "quantization.method",
        "load_format": "load.format",
        "tensor_parallel_size": "parallel.tensor",
        "pipeline_parallel_size": "parallel.pipeline",
        "data_parallel_size": "parallel.data",
        "block_size": "cache.block_size",
        "kv_cache_dtype": "cache.dtype",
        "generation_config": "model.generation_config",
        "kv_cache_memory_bytes": "cache.memory_bytes",
        "num_gpu_blocks_override": "cache.num_blocks",
        "enable_prefix_caching": "cache.prefix_reuse",
        "max_num_seqs": "scheduler.max_num_seqs",
        "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
        "enable_chunked_prefill": "scheduler.chunked_prefill",
        "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
        "scheduling_policy": "scheduler.policy",
        "enable_lora": "lora.enabled",
        "max_loras": "lora.max_loras",
        "max_lora_rank": "lora.max_lora_rank",
        "max_cpu_loras": "lora.max_cpu_loras",
    }
)
"""Keyword arguments of ``LLM``, by the names of vLLM, to the settings that they stand for."""

ENFORCE_EAGER = "enforce_eager"
COMPILATION = "compilation_config"
_LEVEL = "compilation_config.level"

_OF_TEMPLATE = "the chat template decides the form, and the server finds it: leave it out"
_OF_TOKENIZER = "the tokenizer is the checkpoint's: put other files into a copy of the checkpoint"
_OF_CONFIG = "edit config.json in a copy of the checkpoint"
_OF_REVISION = (
    "revisions come from the Hub's own cache: name the folder of the snapshot as the model"
)
_OF_HOSTS = (
    "set parallel.executor to external, and start the program by torchrun on each host, or to ray"
)
_OF_TLS = "leave TLS to a proxy in front of the server"
_OF_TASK = "the checkpoint decides between answers and embeddings: leave it out"

_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "gpu_memory_utilization": "gpu_memory_utilization is vLLM's share of all memory, for "
        "weights and cache: set cache.memory_share, the cache's share of what is free when the "
        "model has been loaded",
        "speculative_config": "set speculation.method to ngram or suffix",
        "served_model_name": "set server.model_name",
        "max_logprobs": "set server.max_logprobs",
        "max_num_partial_prefills": "set scheduler.long_prefill_token_threshold",
        "max_long_partial_prefills": "set scheduler.long_prefill_token_threshold",
        "allowed_origins": "set server.cors_origins",
        "model_impl": "set model.implementation to auto, opgraft or transformers",
        "use_tqdm_on_load": "set load.progress",
        "download_dir": "models are read from the Hub's own cache: set the variable HF_HUB_CACHE",
        "distributed_executor_backend": "set parallel.executor to in_process, processes, ray or "
        "external",
        "enable_expert_parallel": "set parallel.expert to the number of ranks that share experts",
        "enable_eplb": "set parallel.expert_balance_steps",
        "num_redundant_experts": "set parallel.redundant_experts",
        "device": "set platform",
        "attention_backend": "set providers, such as attention=NAME",
        "cudagraph_capture_sizes": "set compilation_config.capture_sizes",
        "kv_cache_dtype_skip_layers": "cache.dtype holds for all layers",
        "swap_space": "nothing is swapped: a request that gives way is computed anew",
        "cpu_offload_gb": "weights are not offloaded: quantize them by quantization.method, or "
        "share layers between ranks by parallel.tensor",
        "worker_cls": "derive a worker from opgraft.kernels.engine.Worker, and declare it by "
        "register_oot",
        "scheduler_cls": "derive a scheduler and declare it by register_oot",
        "trust_remote_code": "no code of a checkpoint runs: leave it out",
        "enable_log_requests": "set server.log_prompts",
        "disable_log_requests": "set server.log_prompts to false, which is the default",
        "uvicorn_log_level": "set the variable OPGRAFT_LOG",
        "additional_config": "a plugin declares settings of its own, each of which is an option",
        "tool_call_parser": _OF_TEMPLATE,
        "enable_auto_tool_choice": _OF_TEMPLATE,
        "reasoning_parser": _OF_TEMPLATE,
        "chat_template_content_format": _OF_TEMPLATE,
        "trust_request_chat_template": "set server.request_templates",
        "default_chat_template_kwargs": "a request gives chat_template_kwargs",
        "tokenizer": _OF_TOKENIZER,
        "tokenizer_mode": _OF_TOKENIZER,
        "tokenizer_revision": _OF_REVISION,
        "revision": _OF_REVISION,
        "code_revision": "no code of a checkpoint runs: leave it out",
        "hf_overrides": _OF_CONFIG,
        "hf_config_path": _OF_CONFIG,
        "rope_scaling": _OF_CONFIG,
        "rope_theta": _OF_CONFIG,
        "override_generation_config": "edit generation_config.json in a copy of the checkpoint, or "
        "set model.generation_config to none",
        "optimization_level": "set compilation_config.level",
        "max_seq_len_to_capture": "set compilation_config.capture_sizes",
        "max_cudagraph_capture_size": "set compilation_config.capture_sizes",
        "async_scheduling": "a step follows the one before: leave it out",
        "disable_log_stats": "figures are at /metrics, and no log repeats them: leave it out",
        "disable_sliding_window": "layers keep their windows: leave it out",
        "limit_mm_per_prompt": "requests have texts alone: leave it out",
        "mm_processor_kwargs": "requests have texts alone: leave it out",
        "task": _OF_TASK,
        "runner": _OF_TASK,
        "convert": _OF_TASK,
        "nnodes": _OF_HOSTS,
        "node_rank": _OF_HOSTS,
        "master_addr": _OF_HOSTS,
        "master_port": _OF_HOSTS,
        "ssl_keyfile": _OF_TLS,
        "ssl_certfile": _OF_TLS,
        "ssl_ca_certs": _OF_TLS,
        "root_path": "have a proxy in front of the server remove the path",
        "uds": "the server listens on an address: set server.host and server.port",
        "enable_request_id_headers": "each answer has x-request-id: leave it out",
        "enable_prompt_tokens_details": "each answer has prompt_tokens_details: leave it out",
        "kv_transfer_config": "set handover.tokens, above which a second process computes prompts",
        "spec_method": "set speculation.method to ngram or suffix",
        "spec_tokens": "set speculation.max_tokens",
        "spec_model": "drafts come from texts, and from no model: set speculation.method",
        "guided_decoding_backend": "llguidance compiles all grammars: leave it out",
        "structured_outputs_config": "llguidance compiles all grammars: leave it out",
    }
)
"""Arguments of vLLM that no keyword of ``LLM`` takes, to the next step."""

_ABBREVIATIONS = MappingProxyType(
    {
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-ep": "enable_expert_parallel",
        "-sc": "speculative_config",
        "-q": "quantization",
    }
)

_OF_COMPILATION: Mapping[str, str] = MappingProxyType(
    {
        "cudagraph_mode": "graph_mode",
        "cudagraph_capture_sizes": "capture_sizes",
        "cache_dir": "cache_folder",
        "debug_dump_path": "dump_graphs",
        "inductor_passes": "user_passes",
        "compile_ranges_split_points": "compile_ranges",
    }
)
"""Keys of vLLM's compilation config, to the settings of the section ``compilation_config`` here."""


def advice_about(argument: str) -> str | None:
    """Return the next step for an argument of vLLM, or ``None`` if the argument is not known."""
    if argument in SHORT_NAMES:
        return f"set {SHORT_NAMES[argument]}"
    return _ADVICE.get(argument)


def advice_about_option(option: str) -> str | None:
    """Return the option to use instead of an option of vLLM, or ``None`` if it is not known."""
    name = option.partition("=")[0]
    argument = _ABBREVIATIONS.get(name, name.lstrip("-").replace("-", "_"))
    # Some write "-" for "_", as vLLM's options have it.
    if argument in FIELDS:
        return f"use --{argument}"
    # vLLM has an option --no-NAME for each flag.
    negated = argument.removeprefix("no_")
    advice = advice_about(argument)
    if advice is None and negated != argument:
        advice = advice_about(negated)
        advice = advice and f"{advice} false"
    if advice is None:
        return None
    # The table advises in names of settings. On the command line each of these is an option.
    words = (f"--{word}" if word in FIELDS else word for word in advice.split(" "))
    return " ".join(words).replace("set --", "use --")


def level_of_eager(value: Any) -> dict[str, int]:
    """Return the setting that ``enforce_eager`` stands for: level 0, or none if the value is false.

    Raises:
        ConfigError: the value is neither true nor false.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{ENFORCE_EAGER} is {value!r:.80}: use True, which is level 0, or False")
    return {_LEVEL: 0} if value else {}


def compilation_settings(given: Any) -> dict[str, Any]:
    """Return the settings of ``compilation_config`` by dotted names.

    Args:
        given: a mapping, as vLLM takes it, a ``CompilationConfig``, or the number of a mode.

    Raises:
        ConfigError: it is something else, or has a key that is no setting.
    """
    if isinstance(given, CompilationConfig):
        return {field.name: value for field, value in values_of(given) if value is not None}
    # vLLM takes a plain number for the mode, too.
    if isinstance(given, int) and not isinstance(given, bool):
        return {f"{COMPILATION}.mode": given}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{COMPILATION} is {given!r:.80}: use a mapping, such as {{'level': 2}}, or a "
            "CompilationConfig"
        )
    return {_known_key(str(key)): value for key, value in given.items()}


def _known_key(key: str) -> str:
    """Return the dotted name of a key.

    Raises:
        ConfigError: there is no such setting.
    """
    dotted = f"{COMPILATION}.{key}"
    if dotted in FIELDS:
        return dotted
    ours = _OF_COMPILATION.get(key)
    if ours:
        raise ConfigError(f"{COMPILATION} has no key {key!r}: it is {ours!r} here")
    prefix = f"{COMPILATION}."
    known = [name.removeprefix(prefix) for name in FIELDS if name.startswith(prefix)]
    raise ConfigError(f"{COMPILATION} has no key {key!r}: {close_matches(key, known)}")
