"""``LoRARequest``: the adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.errors import RequestError

NO_LORA = 0
"""The number of requests without an adapter."""

LONGEST_NAME = 200
"""Characters of an adapter's name."""


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, by the names of vLLM.

    Attributes:
        lora_name: for messages, and for clients of a server.
        lora_int_id: the number of the adapter, at least 1. Two adapters have two numbers.
        lora_path: the folder that PEFT has saved, or the name of such a folder in the local Hugging
            Face cache.

    Raises:
        RequestError: a value has a wrong type, the name or the path is empty, the name is too long
            or cannot be printed, or the number is below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise RequestError(f"{field} is {value!r:.80}: give a text", field)
        # All clients of a server see the name.
        if len(self.lora_name) > LONGEST_NAME or not self.lora_name.isprintable():
            raise RequestError(
                f"lora_name is {self.lora_name!r:.80}: give at most {LONGEST_NAME} characters that "
                "can be printed",
                "lora_name",
            )
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RequestError(
                f"lora_int_id is {number!r:.80}: give a number from 1 on", "lora_int_id"
            )
