"""``FrontEnd``: what is asked of an engine of texts, be it one engine or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

from opgraft.binding.explaining import Explanation
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.serving.chat_template import ChatTemplate
from opgraft.serving.grammars import Grammars
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.prompts import Prompt
from opgraft.serving.tokenizer import Tokenizer


class FrontEnd(ABC):
    """Prompts in, texts out, for one caller.

    Attributes:
        inputs: makes requests of prompts.
    """

    inputs: InputProcessor

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model, if it has one."""
        return self.inputs.tokenizer

    def expect_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            InputError: the model has none.
        """
        return self.inputs.expect_tokenizer()

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model."""
        return self.inputs.chat_template

    @property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs."""
        return self.inputs.grammars

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return self.inputs.vocab_size

    def encode(self, prompt: Prompt, **options: Any) -> tuple[str | None, list[int]]:
        """Return the text and the token ids of a prompt, as ``InputProcessor.encode`` does."""
        return self.inputs.encode(prompt, **options)

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, **options: Any
    ) -> OpenRequest:
        """Check a request and make it ready for ``submit``, as ``InputProcessor.prepare`` does; from any thread."""
        return self.inputs.prepare(request_id, prompt, params, **options)

    def expect_priority(self, priority: int) -> None:
        """Refuse a priority where the order is that of arrival.

        Raises:
            RequestError: there is one.
        """
        self.inputs.expect_priority(priority)

    def add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, **options: Any
    ) -> RequestOutput:
        """Prepare a request and submit it; arguments and errors are those of ``prepare`` and ``submit``."""
        return self.submit(self.prepare(request_id, prompt, params, **options))

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Return True if a request has not ended."""

    @abstractmethod
    def submit(self, prepared: OpenRequest) -> RequestOutput:
        """Have a request wait for its turn, and return its output, which grows with the steps.

        Raises:
            RequestError: one of its id runs, or it could never be served.
            EngineError: the engine has stopped.
        """

    @abstractmethod
    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, and return what it has so far.

        Raises:
            RequestError: none of that id runs or waits.
        """

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """Return the requests that have news, once there are some.

        Raises:
            EngineError: the engine has stopped.
        """

    @abstractmethod
    def is_open(self, output: RequestOutput) -> bool:
        """Tell whether the request of an output that ``submit`` returned may still have news."""

    @abstractmethod
    def output_of(self, request_id: str) -> RequestOutput:
        """Return the output of a request that has not ended.

        Raises:
            RequestError: none of that id runs or waits.
        """

    def stream(self, request_id: str) -> Generator[RequestOutput, None, None]:
        """Compute steps until a request ends, and yield its output whenever it has grown.

        A request whose iterator is closed before is aborted.

        Raises:
            RequestError: none of that id runs or waits.
        """
        output = self.output_of(request_id)
        try:
            while self.is_open(output):
                for changed in self.step():
                    if changed.request_id == request_id:
                        yield changed
        finally:
            if self.is_open(output):
                self.abort(request_id)

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return what runs, and totals since the model was loaded; from any thread."""

    @abstractmethod
    def explain(self) -> Explanation:
        """Tell which kernel runs each op of the model, and of which classes the parts of the engine are, and why."""

    @abstractmethod
    def capacity(self) -> str:
        """Say in words what the cache holds."""

    @property
    @abstractmethod
    def cache_tokens(self) -> int:
        """The tokens of long sequences that the cache holds."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the model and its cache."""
