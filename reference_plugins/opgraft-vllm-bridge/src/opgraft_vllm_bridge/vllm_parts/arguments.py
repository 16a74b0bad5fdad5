"""The arguments of an engine: ``vllm.engine.arg_utils`` and ``vllm.utils.argparse_utils``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast, get_args, get_type_hints

from opgraft import set_config
from opgraft.config import config_from_fields

from opgraft_vllm_bridge.vllm_parts.config import (
    SETTINGS,
    ModelConfig,
    VllmConfig,
    current_settings,
)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that reads ``--max_model_len`` as ``--max-model-len``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given: Sequence[str] = sys.argv[1:] if args is None else args
        with_dashes = [_with_dashes(each) for each in given]
        return super().parse_known_args(with_dashes, namespace)


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    option, sign, value = argument.partition("=")
    name = option.removeprefix("--").replace("_", "-")
    return f"--{name}{sign}{value}"


@dataclass
class EngineArgs:
    """Arguments of an engine that opgraft has settings for. None means not given."""

    model: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    quantization: str | None = None
    seed: int | None = None
    load_format: str | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    num_gpu_blocks_override: int | None = None
    data_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Return the parser, with an option for each argument."""
        for name, hint in get_type_hints(EngineArgs).items():
            option = f"--{name.replace('_', '-')}"
            # A hint is one type or None.
            (kind,) = set(get_args(hint)) - {type(None)}
            if kind is bool:
                parser.add_argument(option, action=argparse.BooleanOptionalAction)
            else:
                parser.add_argument(option, type=kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the arguments that a parser has read."""
        return cls(**{each.name: getattr(args, each.name, None) for each in fields(cls)})

    def create_model_config(self) -> ModelConfig:
        """Return the settings of the model, as ``create_engine_config`` does for all settings."""
        # Only a platform of a plugin removes the section.
        return cast("ModelConfig", self.create_engine_config().model_config)

    def create_engine_config(self) -> VllmConfig:
        """Return the settings of this process with these arguments, in vLLM's terms.

        Raises:
            ConfigError: an argument has a value that opgraft does not take.
        """
        names = {theirs.rpartition(".")[2]: ours for theirs, ours in SETTINGS.items()}
        values = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                values[names[each.name]] = value
        with set_config(config_from_fields(values), origin="EngineArgs"):
            return current_settings()
