"""Loading the plugins in a child process first, where one that ends its process takes nothing else down."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from opgraft.config import FIELDS, config_from_fields, set_config
from opgraft.environment import PLUGINS_DISABLE
from opgraft.errors import ChildError
from opgraft.machine.child import Ended, run_child
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins
from opgraft.plugins.requirements import objection
from opgraft.plugins.watching import BEGINS, ENDS, logger
from opgraft.state import host_state

TIME_LIMIT = 120.0  # seconds; importing torch from a cold disk takes most of a minute

_CHILD = "from opgraft.plugins.rehearsal import answer; answer(reply_to, **data)"
_SURVIVED = "survived"


def rehearse(modules: Sequence[str] = (), time_limit: float = TIME_LIMIT) -> str | None:
    """Import ``modules`` and load the plugins in a child process, under the settings that hold here.

    Returns:
        What ended or held up the process, naming the plugin; ``None`` where it survives, whatever else is wrong with a
        plugin, and where there is no plugin to try.
    """
    config = host_state().settings().config
    if all(offer.built_in or objection(offer, config) for offer in discover().offers):
        return None
    values = {name: value for name in FIELDS if (value := attrgetter(name)(config)) is not None}
    data = {"modules": list(modules), "settings": values}
    try:
        ended = run_child(_CHILD, (), data, time_limit, os.environ)
    except ChildError as error:
        return f"the plugins cannot be tried in a process of their own: {error}"
    lines = ended.reply.splitlines()
    if _SURVIVED in lines[-1:]:
        return None
    return f"{lines[-1] if lines and lines[-1] else 'importing ' + ', '.join(modules)} {_end(ended, time_limit)}"


def _end(ended: Ended, time_limit: float) -> str:
    advice = f"Go without the plugin by {PLUGINS_DISABLE}."
    if ended.status is None:
        return f"did not come back within {time_limit:g} s. {advice}"
    if ended.status < 0:
        return f"crashed the process with signal {signal.Signals(-ended.status).name}. {advice}"
    return f"ended the process with status {ended.status}. {advice}"


def answer(reply_to: int, modules: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Load the plugins on the child's side, and write whose code runs before it does."""
    logger.addHandler(_Reporter(reply_to))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    with suppress(Exception, SystemExit):  # what can be caught is told where the plugins are loaded in earnest
        for module in modules:
            importlib.import_module(module)
        with set_config(config_from_fields(settings)):
            load_plugins()
    os.write(reply_to, f"{_SURVIVED}\n".encode())


class _Reporter(logging.Handler):
    """Writes a line with whose code begins, and an empty one when it has ended."""

    def __init__(self, reply_to: int) -> None:
        super().__init__(logging.DEBUG)
        self.reply_to = reply_to

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg in (BEGINS, ENDS) and isinstance(record.args, tuple):
            line = str(record.args[0]) if record.msg == BEGINS else ""
            os.write(self.reply_to, f"{line}\n".encode())
