"""``create_app``: the interface as an ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from opgraft.base.version import __version__
from opgraft.engine.lora.held import ADAPTER_UNUSABLE
from opgraft.errors import HTTPError, OpgraftError, RequestError
from opgraft.serving.server import faults
from opgraft.serving.server.adapters import ServedAdapters
from opgraft.serving.server.bodies import BodyRoute
from opgraft.serving.server.chat import Chat
from opgraft.serving.server.completions import Completion
from opgraft.serving.server.embeddings import embed
from opgraft.serving.server.gate import Gate
from opgraft.serving.server.messages import Message, count_tokens
from opgraft.serving.server.messages_protocol import CountRequest, MessagesRequest
from opgraft.serving.server.page import page
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.protocol import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ErrorAnswer,
    LoadAdapterRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from opgraft.serving.server.responses import ModelResponse
from opgraft.serving.server.responses_protocol import ResponsesRequest
from opgraft.serving.server.scoring import Scoring
from opgraft.serving.server.service import Service
from opgraft.serving.server.tokens import detokenize, tokenize, tokenizer_info
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorAnswer, "description": "The server cannot serve it now."},
}
work = APIRouter(route_class=BodyRoute, responses=_ERRORS)
"""Routes with work for the model. Such requests may have to wait."""

router = APIRouter(route_class=BodyRoute, responses=_ERRORS)
"""All other routes."""


def create_app(service: Service, api_keys: Sequence[str] = ()) -> FastAPI:
    """Make the application.

    Args:
        service: the model with its settings.
        api_keys: a client must send one of these. Without keys, every client may ask.
    """
    # The usual pages of documentation would load scripts from another host.
    app = FastAPI(
        title="opgraft", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.include_router(work)
    app.include_router(router)
    for kind in (OpgraftError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    admitted = frozenset(route.path for route in work.routes if isinstance(route, BodyRoute))
    app.add_middleware(Gate, service=service, admitted=admitted, api_keys=api_keys)
    if service.settings.cors_origins:
        origins = list(service.settings.cors_origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def _answer(request: Request, error: Exception) -> Response:
    answer = request.state.passing.note(error)
    return faults.response(answer, request.url.path)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _passing(request: Request) -> Passing:
    passing: Passing = request.state.passing
    return passing


def _scoring(request: Request) -> Scoring:
    return Scoring(_service(request), _passing(request))


@router.get("/", include_in_schema=False)
async def show_page() -> Response:
    """Show the page for people."""
    return page()


@work.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or each of several prompts."""
    return await Completion(_service(request), body, _passing(request)).respond()


@work.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a chat."""
    return await Chat(_service(request), body, _passing(request)).respond()


@work.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation with items, and keep the response."""
    service = _service(request)
    passing = _passing(request)
    before: list[Any] = []
    if body.previous_response_id is not None:
        before = await service.responses.messages(passing.owner, body.previous_response_id)
    return await ModelResponse(service, body, passing, before).respond()


@router.get("/v1/responses/{response_id}")
async def show_response(response_id: str, request: Request, stream: str | None = None) -> Response:
    """Show a kept response."""
    if stream == "true":
        message = "stream has a value that is not supported: leave it out to get the whole response"
        raise HTTPError(400, message, field="stream", code="unsupported_value")
    found = await _service(request).responses.response(_passing(request).owner, response_id)
    return Response(found, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a kept response."""
    await _service(request).responses.drop(_passing(request).owner, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@work.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat of Anthropic's interface."""
    return await Message(_service(request), body, _passing(request)).respond()


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(body: CountRequest, request: Request) -> JSONResponse:
    """Return the number of tokens of a chat of Anthropic's interface."""
    return JSONResponse(await count_tokens(_service(request), body, _passing(request)))


@work.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> JSONResponse:
    """Return the vectors of texts."""
    return JSONResponse(await embed(_service(request), body, _passing(request)))


@work.post("/pooling")
async def create_pooled(body: PoolingRequest, request: Request) -> JSONResponse:
    """Return a vector for each text."""
    return JSONResponse(await _scoring(request).pool(body))


@work.post("/classify")
async def create_labels(body: ClassifyRequest, request: Request) -> JSONResponse:
    """Return the labels of texts with their probabilities."""
    return JSONResponse(await _scoring(request).classify(body))


@work.post("/score")
@work.post("/v1/score")
async def create_scores(body: ScoreRequest, request: Request) -> JSONResponse:
    """Return the scores of pairs of texts."""
    return JSONResponse(await _scoring(request).score(body))


@work.post("/rerank")
@work.post("/v1/rerank")
@work.post("/v2/rerank")
async def create_order(body: RerankRequest, request: Request) -> JSONResponse:
    """Return documents by their relevance for a query."""
    return JSONResponse(await _scoring(request).rerank(body))


@router.post("/tokenize")
async def create_tokens(body: TokenizeRequest, request: Request) -> JSONResponse:
    """Return the token ids of a text or a chat."""
    return JSONResponse(await tokenize(_service(request), body))


@router.post("/detokenize")
async def create_text(body: DetokenizeRequest, request: Request) -> JSONResponse:
    """Return the text of token ids."""
    return JSONResponse(await detokenize(_service(request), body))


@router.get("/tokenizer_info")
async def show_tokenizer(request: Request) -> dict[str, Any]:
    """Return the special tokens and the chat template."""
    return tokenizer_info(_service(request))


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the served model, once for each of its names, and its adapters."""
    service = _service(request)
    return {"object": "list", "data": service.cards()}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> dict[str, Any]:
    """Show the served model, or an adapter."""
    service = _service(request)
    service.expect_model(name)
    return service.card(name)


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter, if the operator allows this."""
    adapters = _changeable_adapters(request)
    name = body.lora_name
    try:
        await adapters.load(name, body.lora_path, replaces=body.load_inplace)
    except RequestError as error:
        if error.code != ADAPTER_UNUSABLE:
            raise
        # This client has given the path, so the client learns what is wrong with the files.
        raise HTTPError(400, error.message, field="lora_path", code=error.code) from error
    told = f"Success: LoRA adapter '{name}' added successfully."
    return PlainTextResponse(told)


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Forget an adapter, if the operator allows this."""
    adapters = _changeable_adapters(request)
    name = body.lora_name
    await adapters.unload(name)
    told = f"Success: LoRA adapter '{name}' removed successfully."
    return PlainTextResponse(told)


def _changeable_adapters(request: Request) -> ServedAdapters:
    """Return the adapters.

    Raises:
        HTTPError: the operator does not allow changes.
    """
    service = _service(request)
    if service.settings.lora_updates:
        return service.adapters
    message = "this server keeps its adapters, unless server.lora_updates allows changes"
    raise HTTPError(403, message, code="not_allowed")


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Succeed if the model has generated a token, and an engine runs."""
    service = _service(request)
    await service.check()
    return service.health()


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """Succeed as ``/health`` does, with no content. SageMaker asks so."""
    await _service(request).check()
    return Response()


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Return the number of other requests in flight."""
    return {"server_load": len(_service(request).flights) - 1}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of opgraft."""
    return {"version": __version__}


@router.get("/server_info")
async def show_settings(request: Request) -> dict[str, Any]:
    """Return the version, the platform and the settings of the server."""
    return {"version": __version__, **_service(request).info()}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in the format of Prometheus."""
    registry = _service(request).registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/decisions")
async def decisions(request: Request) -> JSONResponse:
    """Return the decisions: the platform, and the kernel and provider of each op, with reasons."""
    return JSONResponse(await _service(request).decisions())
