"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

import sys
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.prompts import tokenized
from opgraft.serving.server.chat_messages import expect_allowed, for_template, template_values
from opgraft.serving.server.contradictions import expect_no_contradiction
from opgraft.serving.server.faults import at
from opgraft.serving.server.protocol import DetokenizeRequest, TokenizeRequest
from opgraft.serving.server.service import Service


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Return the token ids of a text, or of a chat in the model's template.

    Raises:
        HTTPError: the body has neither, both, a field without effect, or a template that the
            operator does not allow.
        RequestError: the template refuses the messages, or the text has no tokens.
        InputError: the model has no tokenizer.
    """
    service.expect_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise HTTPError(400, "give either prompt or messages", field="prompt", code="invalid_value")
    expect_no_contradiction(body)
    expect_allowed(body.chat_template, service.settings.request_templates)
    with at("prompt" if body.messages is None else "messages"):
        ids = await service.prepare(_encoded, service, body)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = service.tokenizer.tokens_as_written(ids)
    return answer


def _encoded(service: Service, body: TokenizeRequest) -> list[int]:
    prompt: str | list[int] = body.prompt or ""
    special = body.add_special_tokens is not False
    if body.messages is not None:
        # A template writes the special tokens itself.
        special = bool(body.add_special_tokens)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        prompt = service.rendered_chat(
            for_template(body.messages),
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            source=body.chat_template,
            values=template_values(body.chat_template_kwargs),
        )
    if isinstance(prompt, str):
        service.expect_characters(prompt, "prompt" if body.messages is None else "messages")
    return tokenized(
        prompt,
        service.tokenizer,
        vocab_size=service.vocab_size,
        max_model_len=sys.maxsize,
        add_special_tokens=special,
    )[1]


async def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of token ids.

    Raises:
        HTTPError: the vocabulary lacks an id.
        InputError: the model has no tokenizer.
    """
    service.expect_model(body.model)
    if len(body.tokens) > service.max_model_len:
        raise HTTPError(
            400,
            f"tokens has {len(body.tokens)} ids, and this model's maximum context length is "
            f"{service.max_model_len} tokens: send them in parts",
            field="tokens",
            code="context_length_exceeded",
        )
    size = service.vocab_size
    unknown = next((token for token in body.tokens if token >= size), None)
    if unknown is not None:
        message = f"tokens has {unknown}, and the vocabulary has {size}: use 0 to {size - 1}"
        raise HTTPError(400, message, field="tokens", code="invalid_value")
    text = await service.prepare(_decoded, service, body)
    return {"prompt": text}


def _decoded(service: Service, body: DetokenizeRequest) -> str:
    return service.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the special tokens by name, the chat template and the longest context.

    Raises:
        InputError: the model has no tokenizer.
    """
    tokenizer = service.tokenizer
    return {
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_templates.get("default"),
        "model_max_length": service.max_model_len,
        "vocab_size": tokenizer.vocab_size,
    }
