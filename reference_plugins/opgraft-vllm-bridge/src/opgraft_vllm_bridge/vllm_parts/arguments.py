"""``vllm.engine.arg_utils`` and ``vllm.utils.argparse_utils``: arguments of an engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from opgraft import set_config
from opgraft.config import config_from_fields

from opgraft_vllm_bridge.vllm_parts.config import SETTINGS, VllmConfig, current_settings


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given: Sequence[str] = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(each) for each in given], namespace)


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, sign, value = argument.partition("=")
    return f"--{name[2:].replace('_', '-')}{sign}{value}"


@dataclass
class EngineArgs:
    """Arguments of an engine, as far as opgraft has settings for them. ``None``: not given."""

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
            # Each is a type or None.
            (taken,) = set(get_args(hint)) - {type(None)}
            option = f"--{name.replace('_', '-')}"
            if taken is bool:
                parser.add_argument(option, action=argparse.BooleanOptionalAction)
            else:
                parser.add_argument(option, type=taken)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        return cls(**{each.name: getattr(args, each.name, None) for each in fields(cls)})

    def create_engine_config(self) -> VllmConfig:
        """Return the settings of this process with these arguments, in vLLM's terms.

        Raises:
            ConfigError: an argument has a value that opgraft does not take.
        """
        ours = {theirs.rpartition(".")[2]: name for theirs, name in SETTINGS.items()}
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        values = {ours[name]: value for name, value in given.items() if value is not None}
        with set_config(config_from_fields(values), origin="EngineArgs"):
            return current_settings()
