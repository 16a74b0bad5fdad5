"""opgraft's settings under vLLM's names: ``vllm.config``.

The classes have attributes for opgraft's settings, and for some settings of vLLM that plugins
often read or set.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from opgraft import CompilationMode, CustomOp, OpgraftConfig, current_platform
from opgraft.config import config_from_fields
from opgraft.errors import ConfigError
from opgraft.plugins.bridges import current_config, origin_of

LAYERS: dict[str, Any] = {}
"""Name → layer of a plugin. Ops of plugins look their layers up here while a batch is computed."""


class CUDAGraphMode(enum.Enum):
    """Ways to capture and replay graphs. opgraft captures none for a plugin of vLLM."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


class Settings:
    """Settings that a plugin may change while its platform is asked for defaults, but not later."""

    __slots__ = ("_assigned", "_sealed")
    _assigned: set[str]

    def note_assignments(self) -> None:
        """Note each assignment from now on, even of the same value."""
        object.__setattr__(self, "_assigned", set())

    @property
    def assigned(self) -> frozenset[str]:
        """The settings assigned since ``note_assignments``. An object of a plugin notes nothing."""
        return frozenset(getattr(self, "_assigned", ()))

    def seal(self) -> None:
        """Refuse changes from now on."""
        object.__setattr__(self, "_sealed", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_sealed", False):
            raise ConfigError(
                f"a plugin of vLLM sets {name} of {type(self).__name__}, which changes nothing any "
                "more: it may in its platform's check_and_update_config"
            )
        noted = getattr(self, "_assigned", None)
        if noted is not None:
            noted.add(name)
        object.__setattr__(self, name, value)


@dataclass(slots=True)
class ModelConfig(Settings):
    """The model.

    Attributes:
        hf_config: the checkpoint's config of transformers, or None if no model is named.
    """

    model: str | None
    dtype: torch.dtype
    max_model_len: int | None
    quantization: str | None
    seed: int
    enforce_eager: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    hf_config: Any = None

    @property
    def hf_text_config(self) -> Any:
        """The part of the checkpoint's config that describes its language model."""
        return getattr(self.hf_config, "text_config", None) or self.hf_config

    @property
    def use_mla(self) -> bool:
        """True if attention caches latents instead of keys and values."""
        return getattr(self.hf_text_config, "kv_lora_rank", None) is not None

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)

    def get_total_num_kv_heads(self) -> int:
        text = self.hf_text_config
        heads = getattr(text, "num_key_value_heads", None)
        return int(heads or text.num_attention_heads)

    def get_head_size(self) -> int:
        """Return the size of a head, or of a latent with its rotary part."""
        text = self.hf_text_config
        if self.use_mla:
            return int(text.kv_lora_rank + text.qk_rope_head_dim)
        size = getattr(text, "head_dim", None)
        return int(size or text.hidden_size // text.num_attention_heads)


@dataclass(slots=True)
class CacheConfig(Settings):
    """The cache of keys and values.

    Attributes:
        sliding_window: the window of attention, if the model has the same one in all layers.
    """

    block_size: int
    cache_dtype: str
    enable_prefix_caching: bool
    gpu_memory_utilization: float | None
    num_gpu_blocks_override: int | None
    sliding_window: int | None = None
    user_specified_block_size: bool = False


@dataclass(slots=True)
class SchedulerConfig(Settings):
    """The choice of requests for a step."""

    enable_chunked_prefill: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str
    async_scheduling: bool = False
    scheduler_cls: str | type | None = None

    @property
    def chunked_prefill_enabled(self) -> bool:
        return self.enable_chunked_prefill


@dataclass(slots=True)
class ParallelConfig(Settings):
    """The sizes of groups of ranks."""

    data_parallel_size: int
    pipeline_parallel_size: int
    tensor_parallel_size: int
    data_parallel_rank: int = 0
    decode_context_parallel_size: int = 1
    disable_custom_all_reduce: bool = False
    distributed_executor_backend: str | None = None
    enable_expert_parallel: bool = False
    prefill_context_parallel_size: int = 1
    worker_cls: str = "auto"

    @property
    def world_size(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size


@dataclass(slots=True)
class LoadConfig(Settings):
    """The loading of checkpoints."""

    device: str | None
    load_format: str


@dataclass(slots=True)
class CompilationConfig(Settings):
    """Compilation, and the enabled custom ops."""

    backend: str
    compile_sizes: list[int]
    custom_ops: list[str]
    mode: CompilationMode
    cudagraph_capture_sizes: list[int] = field(default_factory=list)
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    static_forward_context: dict[str, Any] = field(default_factory=lambda: LAYERS)


@dataclass(slots=True)
class DeviceConfig(Settings):
    """The device."""

    device_type: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type)


@dataclass
class KVTransferConfig:
    """The transfer of keys and values by a connector. opgraft has none."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class VllmConfig(Settings):
    """All settings. Sections without a counterpart here, such as that of LoRA, are None.

    Attributes:
        additional_config: a user's settings for a plugin. Always empty: opgraft has no way to
            give them.
    """

    model_config: ModelConfig | None
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    load_config: LoadConfig
    compilation_config: CompilationConfig
    device_config: DeviceConfig
    additional_config: dict[str, Any] = field(default_factory=dict)
    kv_events_config: None = None
    kv_transfer_config: KVTransferConfig | None = None
    lora_config: None = None
    quant_config: Any = None
    speculative_config: None = None

    @classmethod
    def of(cls, config: OpgraftConfig, device_type: str, dtype: torch.dtype) -> VllmConfig:
        """Return opgraft's settings in vLLM's terms.

        Args:
            config: complete settings.
            device_type: the device type of the platform.
            dtype: the meaning of ``auto`` if no model is named.

        Raises:
            CheckpointError: the model's checkpoint is missing or damaged.
        """
        rows: dict[str, dict[str, Any]] = {}
        for theirs, ours in SETTINGS.items():
            section, _, name = theirs.partition(".")
            owner, _, own = ours.rpartition(".")
            value = getattr(getattr(config, owner), own)
            if isinstance(value, tuple):
                value = list(value)
            rows.setdefault(section, {})[name] = value
        compilation = rows["compilation_config"]
        compilation["custom_ops"] = _with_class_names(compilation["custom_ops"])
        model = rows["model_config"]
        described = _described(config.model.name, _written_at(config.model.name))
        model["hf_config"] = described
        model["dtype"] = _dtype_of(config.model.dtype, described, dtype)
        model["enforce_eager"] = config.compilation_config.mode is CompilationMode.NONE
        rows["cache_config"]["sliding_window"] = _window_of(described)
        by_user = origin_of("cache.block_size") != "default"
        rows["cache_config"]["user_specified_block_size"] = by_user
        parallel = rows["parallel_config"]
        parallel["data_parallel_rank"] = config.parallel.data_rank or 0
        parallel["enable_expert_parallel"] = config.parallel.expert > 1
        sections: dict[str, Any] = {}
        for name, row in rows.items():
            sections[name] = _SECTIONS[name](**row)
            sections[name].note_assignments()
        return cls(**sections, device_config=DeviceConfig(device_type))

    def sealed(self) -> VllmConfig:
        """Refuse changes from now on, and return this object."""
        for section in _SECTIONS:
            getattr(self, section).seal()
        self.seal()
        return self


def _with_class_names(custom_ops: list[str]) -> list[str]:
    """Return ``custom_ops`` with an entry for each class, too, because plugins look for classes.

    Example: ``["+rms_norm"]`` becomes ``["+rms_norm", "+RMSNorm"]``.
    """
    found = list(custom_ops)
    for token in custom_ops:
        sign = token[0]
        cls = CustomOp.op_registry.get(token[1:])
        if cls is not None:
            found.append(f"{sign}{cls.__name__}")
    return found


def _written_at(model: str | None) -> int:
    """Return the time of the last change of a model's config, or 0 without such a file."""
    try:
        return (Path(model or "") / "config.json").stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=8)
def _described(model: str | None, written_at: int) -> Any:
    """Return the config of a model's checkpoint, or None if no model is named.

    The result is cached: the constructor of each layer may ask, and a checkpoint is slow to open.
    """
    # Most plugins ask for no model, and the models take as long to import as torch.
    from opgraft.models import open_weights, read_config

    name = config_from_fields({"model.name": model}).resolved().model.name
    if name is None:
        return None
    return read_config(open_weights(name), plain=True)


def _dtype_of(name: str, described: Any, default: torch.dtype) -> torch.dtype:
    """Return the dtype of a model, from the settings, the checkpoint, or the default."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if described is None:
        return default
    found = getattr(described, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _window_of(described: Any) -> int | None:
    """Return the window of attention in a checkpoint's config, if all layers have the same one."""
    text = getattr(described, "text_config", None) or described
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"sliding_attention"} or getattr(text, "use_sliding_window", None) is False:
        return None
    window: int | None = getattr(text, "sliding_window", None)
    return window


_SECTIONS: Mapping[str, Any] = {
    "cache_config": CacheConfig,
    "compilation_config": CompilationConfig,
    "load_config": LoadConfig,
    "model_config": ModelConfig,
    "parallel_config": ParallelConfig,
    "scheduler_config": SchedulerConfig,
}

SETTINGS: Mapping[str, str] = {
    "cache_config.block_size": "cache.block_size",
    "cache_config.cache_dtype": "cache.dtype",
    "cache_config.enable_prefix_caching": "cache.prefix_reuse",
    "cache_config.gpu_memory_utilization": "cache.memory_share",
    "cache_config.num_gpu_blocks_override": "cache.num_blocks",
    "compilation_config.backend": "compilation_config.backend",
    "compilation_config.compile_sizes": "compilation_config.compile_sizes",
    "compilation_config.custom_ops": "compilation_config.custom_ops",
    "compilation_config.mode": "compilation_config.mode",
    "load_config.device": "load.device",
    "load_config.load_format": "load.format",
    "model_config.dtype": "model.dtype",
    "model_config.max_model_len": "model.max_model_len",
    "model_config.model": "model.name",
    "model_config.quantization": "quantization.method",
    "model_config.seed": "model.seed",
    "parallel_config.data_parallel_size": "parallel.data",
    "parallel_config.pipeline_parallel_size": "parallel.pipeline",
    "parallel_config.tensor_parallel_size": "parallel.tensor",
    "scheduler_config.enable_chunked_prefill": "scheduler.chunked_prefill",
    "scheduler_config.max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "scheduler_config.max_num_seqs": "scheduler.max_num_seqs",
    "scheduler_config.policy": "scheduler.policy",
}
"""Setting of vLLM → setting of opgraft."""

_UNHEEDED: Mapping[str, str] = {
    "compilation_config.cudagraph_mode": "opgraft captures the graphs of its own platforms only",
    "kv_transfer_config": "the cache of keys and values is opgraft's own",
    "parallel_config.disable_custom_all_reduce": "the collectives are those of the communicator, "
    "which plugins replace",
    "parallel_config.distributed_executor_backend": "workers are opgraft's own, started as "
    "parallel.executor says",
    "parallel_config.worker_cls": "the worker is opgraft's, which plugins replace under the name "
    "'worker'",
    "scheduler_config.scheduler_cls": "the scheduler is opgraft's, which plugins replace under "
    "the name 'scheduler'",
}
"""Setting that plugins of vLLM often make, to no effect here → the reason."""


def unheeded(name: str) -> str | None:
    """Return the reason why a setting of vLLM has no effect here, or None if it has an effect."""
    if name in SETTINGS:
        return None
    return _UNHEEDED.get(name, "opgraft has no such setting")


def values_of(config: VllmConfig) -> dict[str, Any]:
    """Return dotted name → value for every setting. Lists become tuples."""
    found = {}
    for each in fields(config):
        if each.name.startswith(("kv_", "lora_", "quant_", "speculative_")):
            found[each.name] = getattr(config, each.name)
    for section in _SECTIONS:
        settings = getattr(config, section)
        if settings is None:
            continue
        for each in fields(settings):
            value = getattr(settings, each.name)
            # A plugin may change a list in place, and the values before stay the same.
            found[f"{section}.{each.name}"] = tuple(value) if isinstance(value, list) else value
    return found


def assigned_in(config: VllmConfig) -> set[str]:
    """Return the dotted names of the settings that a plugin has assigned."""
    found: set[str] = set()
    for section in _SECTIONS:
        settings = getattr(config, section)
        if settings is not None:
            found.update(f"{section}.{name}" for name in settings.assigned)
    return found


def as_opgraft(values: Mapping[str, Any]) -> OpgraftConfig:
    """Return settings of vLLM as opgraft's. Settings without an effect are left out.

    Raises:
        ConfigError: opgraft does not take a value.
    """
    ours = {SETTINGS[name]: value for name, value in values.items() if name in SETTINGS}
    dtype = ours.get("model.dtype")
    if dtype:
        ours["model.dtype"] = str(dtype).removeprefix("torch.")
    return config_from_fields(ours)


def current_settings() -> VllmConfig:
    """Return the current settings as a new object. The caller may change the object."""
    platform = current_platform()
    dtype = platform.capability().dtypes[0]
    return VllmConfig.of(current_config(), platform.device_type, dtype)


def get_current_vllm_config() -> VllmConfig:
    """Return the current settings. They refuse changes."""
    return current_settings().sealed()


get_current_vllm_config_or_none = get_current_vllm_config
