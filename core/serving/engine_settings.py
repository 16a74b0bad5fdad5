"""Settings of an engine, from the keyword arguments of ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from opgraft.config import OpgraftConfig, set_config
from opgraft.config.whole import config_from_fields, resolve
from opgraft.errors import ConfigError, close_matches
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "dtype": "model.dtype",
        "max_model_len": "model.max_model_len",
        "seed": "model.seed",
        "quantization": "quantization.method",
        "tensor_parallel_size": "parallel.tensor",
        "data_parallel_size": "parallel.data",
        "block_size": "cache.block_size",
        "kv_cache_dtype": "cache.dtype",
        "enable_prefix_caching": "cache.prefix_reuse",
        "max_num_seqs": "scheduler.max_num_seqs",
        "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
        "enable_chunked_prefill": "scheduler.chunked_prefill",
    }
)
"""Keyword arguments of ``LLM``, by the names of vLLM, to the settings that they stand for."""


def engine_config(
    model: str | None, opgraft_config: OpgraftConfig | None, settings: Mapping[str, Any]
) -> OpgraftConfig:
    """Return the settings of an engine as ``LLM`` takes them.

    Raises:
        ConfigError: a setting that there is not, or a value that it does not take.
    """
    load_plugins()  # which may have settings to add
    named = {"model.name": model} if model is not None else {}
    arguments = config_from_fields({**_by_dotted_names(settings), **named})
    if opgraft_config is None:
        with set_config(arguments, origin="the arguments of LLM"):
            return host_state().settings().handed_down()
    whole = "the opgraft_config of LLM"
    layers = [(whole, opgraft_config), ("the arguments of LLM", arguments)]
    return resolve((), layers).handed_down(whole)


def _by_dotted_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for name, value in settings.items():
        dotted = SHORT_NAMES.get(name, _dotted(name))
        if dotted in found:
            raise ConfigError(
                f"{found[dotted][0]} is {found[dotted][1]!r:.80} and {name} {value!r:.80}, and both stand for "
                f"{dotted}: leave one out"
            )
        found[dotted] = name, value
    return {dotted: value for dotted, (_, value) in found.items()}


def _dotted(name: str) -> str:
    if name == "gpu_memory_utilization":
        raise ConfigError(
            "gpu_memory_utilization is vLLM's share of all memory, for weights and cache: set cache.memory_share, the "
            "cache's share of what is free when the model has been loaded, as in **{'cache.memory_share': 0.9}"
        )
    if "." not in name and name not in SHORT_NAMES:
        raise ConfigError(
            f"LLM has no argument {name!r}: {close_matches(name, SHORT_NAMES)} Every setting is taken by its dotted "
            "name, as in **{'cache.memory_bytes': 1 << 30}"
        )
    return name
