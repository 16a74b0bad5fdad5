"""``opgraft serve``: a model behind OpenAI's interface over HTTP."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click
from opgraft.base.log import logger, write_json
from opgraft.base.text import printable
from opgraft.cli.output import COMMAND_LINE, SettingsCommand, echo, with_settings
from opgraft.config import OpgraftConfig, ParallelConfig, set_config
from opgraft.config.checkpoints import find_checkpoint
from opgraft.engine.workers.started_process import EARLY
from opgraft.errors import ConfigError, InputError
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.serving.server.early_answers import EarlyAnswers
from opgraft.serving.server.signals import ended_by_signals

if TYPE_CHECKING:
    from opgraft.serving.server.service import Service

_ADAPTERS = "--lora-modules"
_KEYS_OF_VLLM = frozenset({"name", "path", "base_model_name", "is_3d_lora_weight"})
"""Keys of an adapter that is written as an object."""

_SHORT = {
    "server.host": "--host",
    "server.port": "--port",
    "server.model_name": "--model-name",
    "server.api_key_file": "--api-key-file",
    "server.drain_seconds": "--drain-seconds",
    "server.lora_modules": _ADAPTERS,
    "model.dtype": "--dtype",
    "model.max_model_len": "--max-model-len",
    "model.chat_template": "--chat-template",
    "compilation_config.level": "-O",
    "compilation_config.dump_graphs": "--dump-graphs",
    "scheduler.max_num_seqs": "--max-num-seqs",
    "parallel.restart_workers": "--restart-workers",
}

_SHAPES_KEPT = "64"


class _ServeCommand(SettingsCommand):
    """The command, with vLLM's spellings of the options of adapters."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, as ``SettingsCommand`` does.

        Raises:
            UsageError: an adapter has another form than ``NAME=FOLDER`` or an object of vLLM.
        """
        return super().parse_args(ctx, _translated(args))


def _translated(args: Sequence[str]) -> list[str]:
    """Return arguments in which vLLM's options of adapters are options of opgraft."""
    found: list[str] = []
    left = deque(args)
    while left:
        word = left.popleft()
        if word in ("--enable-lora", "--no-enable-lora"):
            found += ["--lora.enabled", str(word == "--enable-lora").lower()]
            continue
        found.append(word)
        if word != _ADAPTERS:
            continue
        modules = [left.popleft()] if left else []
        # vLLM takes several words. The model is none of them, as it has no such form.
        while left and ("=" in left[0] or left[0].startswith("{")) and not left[0].startswith("-"):
            modules.append(left.popleft())
        objects = [each for each in modules if each.startswith("{")]
        found += modules if len(modules) == 1 and not objects else [_one_mapping(modules)]
    return found


def _one_mapping(modules: Sequence[str]) -> str:
    """Return the adapters of several words as one object of JSON, a folder by name."""
    folders: dict[str, str] = {}
    for module in modules:
        if not module.startswith("{"):
            name, _, folder = module.partition("=")
            folders[name] = folder
            continue
        try:
            given = json.loads(module)
        except ValueError as error:
            raise click.UsageError(f"{_ADAPTERS} {module!r:.80} is no JSON: {error}") from error
        # As in vLLM. Other objects are mappings of names to folders.
        if given.keys() <= _KEYS_OF_VLLM and {"name", "path"} <= given.keys():
            given = {given["name"]: given["path"]}
        folders |= given
    return json.dumps(folders)


@click.command("serve", cls=_ServeCommand)
@click.argument("model")
@click.option(
    "--api-key",
    "api_keys",
    metavar="KEY",
    multiple=True,
    help="That clients must send; may be repeated.",
)
@functools.partial(with_settings, short=_SHORT, hidden=())
def command(model: str, api_keys: tuple[str, ...]) -> None:
    """Serve MODEL over HTTP, with OpenAI's interface, until a SIGTERM or SIGINT.

    The first signal lets running requests finish, the second ends at once. Exit code 5: the engine
    has stopped.
    """
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    if not all(api_keys):
        raise click.UsageError("--api-key is empty: give a key, or leave the option out")
    find_checkpoint(model)
    settings = host_state().settings().config
    with (
        ended_by_signals(),
        EarlyAnswers(settings.server) as early,
        _memory_of_a_server(),
        _early_worker(settings.parallel),
    ):
        # These import torch.
        from opgraft.engine.planning.splits import expect_split
        from opgraft.serving.engine_settings import engine_config

        write_json()
        logging.getLogger("opgraft.serving.server").setLevel(logging.INFO)
        config = engine_config(model, None, _own_process()).resolved()
        expect_split(config)
        _expect_adapters(config)
        _server().serve(model, config, api_keys, early, _show)


def _expect_adapters(config: OpgraftConfig) -> None:
    """Find the adapters of the server, before minutes are spent on the model.

    Raises:
        CheckpointError: a folder is missing.
        ConfigError: an adapter has a name of the model.
    """
    modules = config.server.lora_modules
    for name, folder in modules.items():
        find_checkpoint(folder)
        if name in config.server.model_name:
            raise ConfigError(
                f"server.lora_modules and server.model_name both have the name {name!r:.80}, and "
                "a request names a model by it: choose another one"
            )
    kept = config.lora.max_cpu_loras or config.lora.max_loras
    if len(modules) > kept:
        logger.warning(
            "server.lora_modules names %d adapters, and %d stay in memory: others are read again "
            "when requests name them. Set lora.max_cpu_loras to %d to keep all",
            len(modules),
            kept,
            len(modules),
        )


@contextmanager
def _memory_of_a_server() -> Iterator[None]:
    """Choose settings of memory for a long-running process. Settings of the operator stay.

    The next step uses freed memory again. oneDNN and torch keep fewer prepared shapes: by default
    they would keep 1,024, and an encoder meets so many.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _SHAPES_KEPT)
    if host_state().settings().origins["cpu_keep_memory"] != "default":
        yield
        return
    with set_config(OpgraftConfig(cpu_keep_memory=True), origin="opgraft serve"):
        yield


def _early_worker(parallel: ParallelConfig) -> AbstractContextManager[None]:
    """Start the process of the worker, which imports torch beside this process.

    Several workers share the processors, and others may be on other hosts: they start later.
    """
    splits = (parallel.tensor, parallel.pipeline, parallel.data)
    is_default = host_state().settings().origins["parallel.executor"] == "default"
    if any(each != 1 for each in splits) or not (is_default or parallel.executor == "processes"):
        return nullcontext()
    return EARLY.running()


def _own_process() -> dict[str, str]:
    """Return the setting for workers in processes, unless the operator has chosen an executor."""
    chosen = host_state().settings().origins["parallel.executor"] != "default"
    # A worker that hangs can be ended, and a crash of a kernel does not end the server.
    return {} if chosen else {"parallel.executor": "processes"}


def _server() -> Any:
    try:
        return importlib.import_module("opgraft.serving.server.run")
    except ImportError as error:
        raise InputError(
            f"the server cannot be imported ({error}): pip install 'opgraft[serve]'"
        ) from error


def _show(service: Service, url: str) -> None:
    """Print the model, the platform, the kernels, the cache and the URL."""
    # Imports torch.
    from opgraft.binding.idle_plugins import idle_plugins

    echo(f"model     {printable(service.name)}")
    echo(f"platform  {current_platform().name}")
    echo(f"kernels   {service.kernels}")
    for idle in idle_plugins():
        echo(f"unused    {idle}")
    echo(f"cache     {service.capacity()}")
    echo(f"url       {url}/v1")
