"""``opgraft serve``: a model behind OpenAI's interface over HTTP."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from opgraft.base.log import write_json
from opgraft.base.text import printable
from opgraft.cli.output import COMMAND_LINE, SettingsCommand, echo, with_settings
from opgraft.config import OpgraftConfig, set_config
from opgraft.config.checkpoints import find_checkpoint
from opgraft.errors import InputError
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state

if TYPE_CHECKING:
    from opgraft.serving.server.service import Service

_SHORT = {
    "server.host": "--host",
    "server.port": "--port",
    "server.model_name": "--model-name",
    "server.api_key_file": "--api-key-file",
    "server.drain_seconds": "--drain-seconds",
    "server.lora_modules": "--lora-modules",
    "model.dtype": "--dtype",
    "model.max_model_len": "--max-model-len",
    "model.chat_template": "--chat-template",
    "compilation_config.level": "-O",
    "compilation_config.dump_graphs": "--dump-graphs",
    "scheduler.max_num_seqs": "--max-num-seqs",
    "parallel.restart_workers": "--restart-workers",
}

_SHAPES_KEPT = "64"


@click.command("serve", cls=SettingsCommand)
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
    # These import torch, which --help does without.
    from opgraft.engine.planning.splits import expect_split
    from opgraft.serving.engine_settings import engine_config

    write_json()
    logging.getLogger("opgraft.serving.server").setLevel(logging.INFO)
    with _memory_of_a_server():
        config = engine_config(model, None, _own_process()).resolved()
        expect_split(config)
        _server().serve(model, config, api_keys, _show)


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


def _own_process() -> dict[str, str]:
    """Return the setting for workers in processes, unless the operator has chosen an executor."""
    chosen = host_state().settings().origins["parallel.executor"] != "default"
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
