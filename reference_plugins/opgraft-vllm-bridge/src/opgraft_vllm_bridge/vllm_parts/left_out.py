"""Registries of vLLM without a use in opgraft. Each entry is reported, and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from opgraft import init_logger
from opgraft.plugins.bridges import shortened

Parser = TypeVar("Parser", bound=type)

logger = init_logger("opgraft.vllm_bridge")


def _leave_out(kind: str, name: str, why: str) -> None:
    logger.warning("the %s %r of a plugin is left out: %s", kind, shortened(name), why)


class _ParserManager:
    """Takes parsers of answers. opgraft reads answers by the chat template of the model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = True,
        module: Parser | None = None,
    ) -> Parser | Callable[[Parser], Parser]:
        """Report a parser, and return the class; or return a decorator for the class."""

        def decorate(parser: Parser) -> Parser:
            names = [name or parser.__name__] if name is None or isinstance(name, str) else name
            for each in names:
                self._report(each)
            return parser

        return decorate if module is None else decorate(module)

    def register_lazy_module(self, name: str, module_path: str, class_name: str) -> None:
        """Report a parser. The module is not imported."""
        self._report(name)

    def _report(self, name: str) -> None:
        _leave_out(self._kind, name, "opgraft reads answers by the chat template of the model")


ReasoningParserManager = _ParserManager("reasoning parser")
ToolParserManager = _ParserManager("tool parser")


class ECConnectorFactory:
    """Takes connectors to caches of encoders in other processes."""

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Report a connector. The module is not imported."""
        _leave_out("connector", name, "opgraft shares no cache of encoders among processes")
