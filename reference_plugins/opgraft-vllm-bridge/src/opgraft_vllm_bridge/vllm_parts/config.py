"""``vllm.config``: opgraft's settings under vLLM's names. A setting that opgraft has not is no attribute here."""

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
"""Layers of plugins by the names under which their ops find them while a batch is computed."""


class CUDAGraphMode(enum.Enum):
    """Ways to capture and replay graphs; no plugin of vLLM has that done here."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


class Settings:
    """Settings that a plugin may change when its platform is asked for defaults, and not later: they are opgraft's."""

    __slots__ = ("_assigned", "_sealed")
    _assigned: set[str]

    def note_assignments(self) -> None:
        """Note from now on which settings are assigned, if only their former values."""
        object.__setattr__(self, "_assigned", set())

    @property
    def assigned(self) -> frozenset[str]:
        """The settings that were assigned since then; none of an object that a plugin has made."""
        return frozenset(getattr(self, "_assigned", ()))

    def seal(self) -> None:
        """Refuse changes from now on."""
        object.__setattr__(self, "_sealed", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_sealed", False):
            raise ConfigError(
                f"a plugin of vLLM sets {name} of {type(self).__name__}, which changes nothing any more: it may in its "
                "platform's check_and_update_config"
            )
        noted = getattr(self, "_assigned", None)
        if noted is not None:
            noted.add(name)
        object.__setattr__(self, name, value)


@dataclass(slots=True)
class ModelConfig(Settings):
    """The model.

    Attributes:
        hf_config: the checkpoint's, as transformers has it; ``None`` if no model is named.
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
        """Tell whether attention keeps latents in the cache instead of keys and values."""
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
        """Return the numbers of a head; with latents, those of a latent and its rotary part."""
        text = self.hf_text_config
        if self.use_mla:
            return int(text.kv_lora_rank + text.qk_rope_head_dim)
        size = getattr(text, "head_dim", None)
        return int(size or text.hidden_size // text.num_attention_heads)


@dataclass(slots=True)
class CacheConfig(Settings):
    """The cache of keys and values."""

    block_size: int
    cache_dtype: str
    enable_prefix_caching: bool
    gpu_memory_utilization: float | None
    num_gpu_blocks_override: int | None
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
    """Compilation, and which custom ops are enabled."""

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
    """The transfer of keys and values by a connector, which opgraft does not have: its cache is its own."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class VllmConfig(Settings):
    """All settings. What opgraft has nothing of, such as LoRA, is ``None``.

    Attributes:
        additional_config: given to a plugin by users beside the others, for which opgraft has no way.
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
        """Tell settings of opgraft, which are complete, in vLLM's terms.

        Args:
            config: the settings.
            device_type: of the platform.
            dtype: the one that ``auto`` stands for without a model.

        Raises:
            CheckpointError: the model's checkpoint is missing or damaged.
        """
        rows: dict[str, dict[str, Any]] = {}
        for theirs, ours in SETTINGS.items():
            section, _, name = theirs.partition(".")
            owner, _, own = ours.rpartition(".")
            value = getattr(getattr(config, owner), own)
            rows.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
        switched = rows["compilation_config"]["custom_ops"]
        rows["compilation_config"]["custom_ops"] = _with_class_names(switched)
        described = _described(config.model.name, _written_at(config.model.name))
        rows["model_config"]["hf_config"] = described
        rows["model_config"]["dtype"] = _dtype_of(config.model.dtype, described, dtype)
        rows["model_config"]["enforce_eager"] = (
            config.compilation_config.mode is CompilationMode.NONE
        )
        rows["cache_config"]["user_specified_block_size"] = (
            origin_of("cache.block_size") != "default"
        )
        rows["parallel_config"]["data_parallel_rank"] = config.parallel.data_rank or 0
        rows["parallel_config"]["enable_expert_parallel"] = config.parallel.expert > 1
        made = {
            each.name: _SECTIONS[each.name](**rows[each.name])
            for each in fields(cls)
            if each.name in rows
        }
        for section in made.values():
            section.note_assignments()
        return cls(**made, device_config=DeviceConfig(device_type))

    def sealed(self) -> VllmConfig:
        """Return itself, which nobody changes any more."""
        for section in _SECTIONS:
            getattr(self, section).seal()
        self.seal()
        return self


def _with_class_names(custom_ops: list[str]) -> list[str]:
    """Return ``custom_ops`` with the names of classes, too, by which plugins look ops up."""
    found = list(custom_ops)
    for token in custom_ops:
        cls = CustomOp.op_registry.get(token[1:])
        if cls is not None:
            found.append(f"{token[0]}{cls.__name__}")
    return found


def _written_at(model: str | None) -> int:
    """Return the time of the config in the folder of a model; 0 if there is none."""
    try:
        return (Path(model or "") / "config.json").stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=8)
def _described(model: str | None, written_at: int) -> Any:
    # Cached, as the constructor of each layer may ask and a checkpoint is slow to open.
    # Most plugins ask for no model, and the models take as long to import as torch.
    from opgraft.models import open_weights, read_config

    name = config_from_fields({"model.name": model}).resolved().model.name
    return None if name is None else read_config(open_weights(name), plain=True)


def _dtype_of(name: str, described: Any, default: torch.dtype) -> torch.dtype:
    """Return the dtype of a model: that of the settings, else the checkpoint's."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if described is None:
        return default
    found = getattr(described, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


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
"""By setting of vLLM, that of opgraft."""

_UNHEEDED: Mapping[str, str] = {
    "compilation_config.cudagraph_mode": "opgraft captures the graphs of its own platforms only",
    "kv_transfer_config": "the cache of keys and values is opgraft's own",
    "parallel_config.disable_custom_all_reduce": "the collectives are those of the communicator, which plugins replace",
    "parallel_config.distributed_executor_backend": "workers are opgraft's own, started as parallel.executor says",
    "parallel_config.worker_cls": "the worker is opgraft's, which plugins replace under the name 'worker'",
    "scheduler_config.scheduler_cls": "the scheduler is opgraft's, which plugins replace under the name 'scheduler'",
}
"""Settings that plugins of vLLM make often and that change nothing here, with the reason."""


def unheeded(name: str) -> str | None:
    """Say why a setting of vLLM changes nothing here, or ``None`` of one that does."""
    return None if name in SETTINGS else _UNHEEDED.get(name, "opgraft has no such setting")


def values_of(config: VllmConfig) -> dict[str, Any]:
    """Return every setting by its dotted name."""
    found = {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.name.startswith(("kv_", "lora_", "quant_", "speculative_"))
    }
    for section in _SECTIONS:
        settings = getattr(config, section)
        if settings is None:
            continue
        values = {each.name: getattr(settings, each.name) for each in fields(settings)}
        found |= {
            f"{section}.{n}": tuple(v) if isinstance(v, list) else v for n, v in values.items()
        }
    return found


def assigned_in(config: VllmConfig) -> set[str]:
    """Return the dotted names of the settings that a plugin has assigned."""
    found = set()
    for section in _SECTIONS:
        settings = getattr(config, section)
        if settings is not None:
            found |= {f"{section}.{name}" for name in settings.assigned}
    return found


def as_opgraft(values: Mapping[str, Any]) -> OpgraftConfig:
    """Return settings of vLLM as opgraft's; those that it does not heed are left out.

    Raises:
        ConfigError: opgraft does not take a value.
    """
    ours = {SETTINGS[name]: value for name, value in values.items() if name in SETTINGS}
    dtype = ours.get("model.dtype")
    return config_from_fields(
        {**ours, **({"model.dtype": str(dtype).removeprefix("torch.")} if dtype else {})}
    )


def current_settings() -> VllmConfig:
    """Return the settings that hold here and now, as an object of the caller's own."""
    platform = current_platform()
    dtype = platform.capability().dtypes[0]
    return VllmConfig.of(current_config(), platform.device_type, dtype)


def get_current_vllm_config() -> VllmConfig:
    """Return the settings that hold here and now, which cannot be written to."""
    return current_settings().sealed()


get_current_vllm_config_or_none = get_current_vllm_config
