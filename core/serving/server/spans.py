"""The spans of OpenTelemetry for a timeline: one for each phase, and three for each step.

They are made as messages of the protocol. A tracer and an exporter of the library would take thirty
times as long, and an answer has thousands of spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from opgraft.base.timeline import NETWORK, QUEUE, RESPOND, Phase, Timeline
from opgraft.base.version import __version__
from opgraft.serving.server.conventions import MODEL, OPERATION

RECEIVE = "receive"
"""The first phase of a request, before the model has a part in it."""

STEPS = "steps"
SPANS_OF_STEP = 3

_SCOPE = InstrumentationScope(name="opgraft", version=__version__)
_NONE: Sequence[KeyValue] = ()
# To look a kind up takes as long as half a span.
_INTERNAL = Span.SPAN_KIND_INTERNAL
_OF_HERE = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_OF_CLIENTS = _OF_HERE | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
"""Flags of spans whose parent is of this process, or of a client."""


class StepSpan(NamedTuple):
    """A step of an engine.

    Attributes:
        begin: the end of the step before, in seconds of ``time.monotonic``.
        end: of the step.
        sample: seconds of the sampler.
        text: seconds of the detokenizer.
        running: sequences in the engine.
        tokens: that the step has computed.
        replica: the number of the engine.
    """

    begin: float
    end: float
    sample: float
    text: float
    running: int
    tokens: int
    replica: int


class Trace(Timeline):
    """A timeline with its place in a trace.

    Args:
        name: of the first phase.
        context: of the first span.
        parent: of the first span, from the client; None without one.
    """

    def __init__(self, name: str, context: SpanContext, parent: SpanContext | None = None) -> None:
        super().__init__(name)
        self.context = context
        self.parent = parent


def new_context(ids: IdGenerator, trace_id: int, state: TraceState | None = None) -> SpanContext:
    """Return the context of a new span."""
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, ids.generate_span_id(), False, sampled, state)


def attributes_of(values: Mapping[str, Any]) -> list[KeyValue]:
    """Return attributes as messages of the protocol.

    Args:
        values: by name; a text, a truth value, a number, or a sequence of these.
    """
    return [KeyValue(key=name, value=_value_of(value)) for name, value in values.items()]


def _value_of(value: Any) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case _:
            values = [_value_of(each) for each in value]
            return AnyValue(array_value=ArrayValue(values=values))


class SpansOfTrace:
    """Makes the spans of a trace. Their times are known, as the work has ended.

    Args:
        timeline: of the trace.
        end: of the last phase, in seconds of ``time.monotonic``.
        steps: of each engine, from the first one with the request to the last.
        resource: of all spans.
        ids: makes the ids of spans.

    Attributes:
        phases: of the timeline.
        request: the message that sends the spans.
        made: the spans so far, as a part of the message.
    """

    def __init__(
        self,
        timeline: Trace,
        end: float,
        steps: Sequence[StepSpan],
        resource: Resource,
        ids: IdGenerator,
    ) -> None:
        self.phases = phases_of(timeline, steps)
        self.request = ExportTraceServiceRequest()
        group = self.request.resource_spans.add(resource=resource)
        self.made = group.scope_spans.add(scope=_SCOPE).spans
        self._timeline = timeline
        self._end = end
        self._steps = steps
        self._ids = ids
        self._since_1970 = time.time_ns() - time.monotonic_ns()
        context = timeline.context
        self._root = context.span_id.to_bytes(8, "big")
        self._trace_id = context.trace_id.to_bytes(16, "big")
        self._state = context.trace_state.to_header()

    def make(
        self,
        name: str,
        kind: Span.SpanKind.ValueType,
        attributes: Mapping[str, Any],
        status: Status,
        detailed: bool,
    ) -> None:
        """Make all spans, those that hold others last.

        Args:
            name, kind, attributes, status: of the first span.
            detailed: make spans for each step. Otherwise one span stands for all steps.
        """
        timeline = self._timeline
        facts = timeline.attributes
        end = self._end
        # A refused request has no part for the model, nor has a path that notes none.
        if OPERATION not in facts:
            self._make_phases(self._root, detailed)
        else:
            model = self._new_id()
            self._make_phases(model, detailed)
            begin = next(phase.begin for phase in self.phases if phase.name != RECEIVE)
            named = f"{facts[OPERATION]} {facts[MODEL]}"
            made = self._span(named, begin, end, model, self._root, attributes_of(facts))
            made.status.CopyFrom(status)
        told = {
            **attributes,
            "opgraft.network.seconds": self._network_seconds(),
        }
        begin = self.phases[0].begin
        first = self._span(name, begin, end, self._root, b"", attributes_of(told))
        first.kind = kind
        first.status.CopyFrom(status)
        if timeline.parent is not None:
            first.parent_span_id = timeline.parent.span_id.to_bytes(8, "big")
            first.flags = _OF_CLIENTS

    def _make_phases(self, model: bytes, detailed: bool) -> None:
        """Make the spans of all phases. The model has no part in the first one."""
        ends = [phase.begin for phase in self.phases[1:]]
        ends.append(self._end)
        for phase, end in zip(self.phases, ends, strict=True):
            begin, name = phase
            parent = model
            if name == RECEIVE:
                parent = self._root
            if name != STEPS:
                self._child(parent, name, begin, end)
            elif detailed:
                self._make_steps(parent, begin, end)
            else:
                told = attributes_of(_of_all(self._steps))
                self._span(name, begin, end, self._new_id(), parent, told)

    def _network_seconds(self) -> float:
        """Return the time in which the client took the answer, also between two steps."""
        seconds = 0.0
        end = self._end
        for phase in sorted(self._timeline.phases, reverse=True):
            if phase.name == NETWORK:
                seconds += end - phase.begin
            end = phase.begin
        return seconds

    def _make_steps(self, parent: bytes, begin: float, end: float) -> None:
        """Make the spans of steps. Only the durations of their parts are known.

        The detokenizer is the last part. The sampler comes before.
        """
        for step in self._steps:
            first = max(step.begin, begin)
            last = min(step.end, end)
            told = _of_step(step.running, step.tokens, step.replica)
            above = self._new_id()
            self._span("step", first, last, above, parent, told)
            texts = max(last - step.text, first)
            samples = max(texts - step.sample, first)
            self._child(above, "sample", samples, texts)
            self._child(above, "detokenize", texts, last)

    def _new_id(self) -> bytes:
        return self._ids.generate_span_id().to_bytes(8, "big")

    def _child(self, parent: bytes, name: str, begin: float, end: float) -> None:
        self._span(name, begin, end, self._new_id(), parent, _NONE)

    def _span(
        self,
        name: str,
        begin: float,
        end: float,
        own_id: bytes,
        parent: bytes,
        attributes: Sequence[KeyValue],
    ) -> Span:
        made: Span = self.made.add(
            trace_id=self._trace_id,
            span_id=own_id,
            trace_state=self._state,
            parent_span_id=parent,
            name=name,
            kind=_INTERNAL,
            start_time_unix_nano=self._since_1970 + int(begin * 1e9),
            end_time_unix_nano=self._since_1970 + int(end * 1e9),
            attributes=attributes,
            flags=_OF_HERE,
        )
        return made


def phases_of(timeline: Timeline, steps: Sequence[StepSpan]) -> list[Phase]:
    """Return the phases in their order. One phase stands for several of one name in a row.

    Between its first and its last step, a request is in the phase ``STEPS`` only, also while the
    server sends tokens to the client.
    """
    phases = sorted(timeline.phases)
    if timeline.computed:
        begin, end = time_of_steps(timeline)
        # The detokenizer goes on after the moment that counts as that of the last token.
        last = max([end, *(step.end for step in steps)])
        phases = _with_steps(phases, begin, last)
    groups = groupby(phases, attrgetter("name"))
    return [next(same) for _, same in groups]


def _with_steps(phases: Sequence[Phase], begin: float, end: float) -> list[Phase]:
    """Return phases with one phase ``STEPS`` between two moments."""
    found = [phase for phase in phases if phase.begin < begin]
    found.append(Phase(begin, STEPS))
    during = [phase.name for phase in phases if phase.begin <= end]
    # A slow client may still take what was sent during the last step.
    is_sent = during[-1:] == [NETWORK]
    found.append(Phase(end, NETWORK if is_sent else RESPOND))
    for phase in phases:
        if phase.begin <= end:
            continue
        # The server had not heard of the end yet.
        name = RESPOND if phase.name == QUEUE else phase.name
        found.append(Phase(phase.begin, name))
    return found


def time_of_steps(timeline: Timeline) -> tuple[float, float]:
    """Return the moments of the first step and of the last token, of all prompts together."""
    found = timeline.computed
    return min(each.begin for each in found), max(each.end for each in found)


# The requests of a step have a span each, with the same attributes.
@lru_cache(maxsize=1024)
def _of_step(running: int, tokens: int, replica: int) -> Sequence[KeyValue]:
    return attributes_of(
        {
            "opgraft.step.running": running,
            "opgraft.step.tokens": tokens,
            "opgraft.step.replica": replica,
        }
    )


def _of_all(steps: Sequence[StepSpan]) -> dict[str, Any]:
    """Return the attributes of a span for several steps."""
    samples = sum(step.sample for step in steps)
    texts = sum(step.text for step in steps)
    return {
        "opgraft.steps.count": len(steps),
        "opgraft.steps.sample_seconds": samples,
        "opgraft.steps.detokenize_seconds": texts,
    }
