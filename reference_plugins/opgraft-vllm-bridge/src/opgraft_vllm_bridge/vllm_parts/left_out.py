"""Registries of vLLM without a use in opgraft. Each entry is reported, and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from opgraft import init_logger
from opgraft.plugins.bridges import shortened

from opgraft_vllm_bridge.vllm_parts.interfaces import note

Model = TypeVar("Model", bound=type)
Parser = TypeVar("Parser", bound=type)

logger = init_logger("opgraft.vllm_bridge")


def _leave_out(kind: str, name: str, why: str) -> None:
    logger.warning("the %s %r of a plugin is left out: %s", kind, shortened(name), why)


class _ParserManager:
    """Takes parsers of answers. opgraft reads answers by the chat template of the model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._registered: dict[str, type] = {}

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
                self._registered[each] = parser
                self._report(each)
            return parser

        return decorate if module is None else decorate(module)

    def register_lazy_module(self, name: str, module_path: str, class_name: str) -> None:
        """Report a parser. The module is not imported."""
        self._report(name)

    def _report(self, name: str) -> None:
        _leave_out(self._kind, name, "opgraft reads answers by the chat template of the model")


class _ToolParserManager(_ParserManager):
    """Takes parsers of calls of tools."""

    @property
    def tool_parsers(self) -> dict[str, type]:
        """Name → class, without the parsers of a path."""
        return self._registered


class _ReasoningParserManager(_ParserManager):
    """Takes parsers of reasoning."""

    @property
    def reasoning_parsers(self) -> dict[str, type]:
        """Name → class, without the parsers of a path."""
        return self._registered


ReasoningParserManager = _ReasoningParserManager("reasoning parser")
ToolParserManager = _ToolParserManager("tool parser")


class _MultiModalRegistry:
    """Takes processors of images and sounds. opgraft gives a model of a plugin tokens alone."""

    def register_processor(
        self, processor: Any, *, info: Any, dummy_inputs: Any
    ) -> Callable[[Model], Model]:
        """Return a decorator of a model, to report the processor."""

        def decorate(model: Model) -> Model:
            why = "opgraft gives a model of a plugin tokens alone"
            _leave_out("processor of inputs for", model.__name__, why)
            return model

        return decorate


MULTIMODAL_REGISTRY = _MultiModalRegistry()


def register_model_loader(load_format: str) -> Callable[[Model], Model]:
    """Return a decorator of a loader, to report the format."""

    def decorate(loader: Model) -> Model:
        _leave_out("loader of the format", load_format, "checkpoints are read by opgraft")
        return loader

    return decorate


def default_pooling_type(
    *, seq_pooling_type: str = "LAST", tok_pooling_type: str = "ALL"
) -> Callable[[Model], Model]:
    """Return a decorator of a model, to report the pooling and to note it in the class.

    Args:
        seq_pooling_type: the pooling of a text to one vector.
        tok_pooling_type: the choice of tokens with vectors of their own.
    """

    def decorate(model: Model) -> Model:
        _leave_out(
            "pooling of the model",
            model.__name__,
            "opgraft pools as the files of a checkpoint for sentence-transformers say",
        )
        # Other code of the plugin may read the attributes, as vLLM does.
        note(model, "default_seq_pooling_type", seq_pooling_type)
        note(model, "default_tok_pooling_type", tok_pooling_type)
        return model

    return decorate


class ECConnectorFactory:
    """Takes connectors to caches of encoders in other processes."""

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Report a connector. The module is not imported."""
        _leave_out("connector", name, "opgraft shares no cache of encoders among processes")
