"""The question that every client asks, the tool that it offers, and the form that it asks for."""

# No annotations as texts: LlamaIndex reads those of a tool where the tool is not known.
from typing import Any, Literal

import pydantic

MODEL = "smollm2"
TEXT = "What is the weather in Paris?"
QUESTION = {"role": "user", "content": TEXT}
NEXT = {"role": "user", "content": "And in Rome?"}
TOKENS = 12
CALL_TOKENS = 60
"""Most tokens of an answer, and of a call."""


class City(pydantic.BaseModel):
    """The arguments of the tool."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]


class Pet(pydantic.BaseModel):
    """A form of answers."""

    kind: Literal["cat", "dog"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": get_weather.__doc__,
        "parameters": City.model_json_schema(),
        "strict": True,
    },
}
