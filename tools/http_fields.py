"""Tell which endpoints and fields OpenAI, Anthropic, vLLM, llama.cpp and this server have.

``python tools/http_fields.py OPENAI ANTHROPIC VLLM`` reads three installed packages, given by their
folders, and writes docs/figures/http_fields.json. llama.cpp's fields stand in that file by hand, from
tools/server/server-schema.cpp and tools/server/README.md of the commit that the file names. The
column of this server comes from its routes: see ``rows``, which tools/reference_pages.py calls.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opgraft.serving.server.app import router, work
from opgraft.serving.server.protocol import Body

FACTS = Path(__file__).parents[1] / "docs/figures/http_fields.json"
MAKERS = ("openai", "anthropic")
PEERS = ("vllm", "llama.cpp")
_COMPARED = {
    "openai": "Python client of OpenAI",
    "anthropic": "Python client of Anthropic",
    "vllm": "vLLM",
    "llama.cpp": "server of llama.cpp, by commit",
}
LEFT_OUT = ("/openapi.json",)
EVERYWHERE = ("model", "user")
"""Fields of nearly every path."""

_CHAT = "/v1/chat/completions"
_TYPES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "openai": {
        _CHAT: ("types/chat/completion_create_params.py", "CompletionCreateParamsBase"),
        "/v1/completions": ("types/completion_create_params.py", "CompletionCreateParamsBase"),
        "/v1/responses": ("types/responses/response_create_params.py", "ResponseCreateParamsBase"),
        "/v1/embeddings": ("types/embedding_create_params.py", "EmbeddingCreateParams"),
    },
    "anthropic": {
        "/v1/messages": ("types/message_create_params.py", "MessageCreateParamsBase"),
        "/v1/messages/count_tokens": (
            "types/message_count_tokens_params.py",
            "MessageCountTokensParams",
        ),
    },
    "vllm": {
        _CHAT: ("entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
        "/v1/completions": ("entrypoints/openai/completion/protocol.py", "CompletionRequest"),
        "/v1/responses": ("entrypoints/openai/responses/protocol.py", "ResponsesRequest"),
        "/v1/messages": ("entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
        "/v1/messages/count_tokens": (
            "entrypoints/anthropic/protocol.py",
            "AnthropicCountTokensRequest",
        ),
        "/v1/embeddings": (
            "entrypoints/pooling/embed/protocol.py",
            "EmbeddingCompletionRequest",
            "EmbeddingChatRequest",
        ),
        "/pooling": (
            "entrypoints/pooling/pooling/protocol.py",
            "PoolingCompletionRequest",
            "PoolingChatRequest",
            "IOProcessorRequest",
        ),
        "/classify": (
            "entrypoints/pooling/classify/protocol.py",
            "ClassificationCompletionRequest",
            "ClassificationChatRequest",
        ),
        "/score": (
            "entrypoints/pooling/scoring/protocol.py",
            "ScoreTextRequest",
            "ScoreQueriesDocumentsRequest",
            "ScoreQueriesItemsRequest",
            "ScoreDataRequest",
        ),
        "/rerank": ("entrypoints/pooling/scoring/protocol.py", "RerankRequest"),
        "/tokenize": (
            "entrypoints/serve/tokenize/protocol.py",
            "TokenizeChatRequest",
            "TokenizeCompletionRequest",
        ),
        "/detokenize": ("entrypoints/serve/tokenize/protocol.py", "DetokenizeRequest"),
    },
}
_SHARED = ("entrypoints/pooling/base/protocol.py",)
"""Files of vLLM with further base classes."""


def main() -> None:
    facts = json.loads(FACTS.read_text("utf-8"))
    for name, folder in zip(_TYPES, map(Path, sys.argv[1:]), strict=True):
        facts[name]["fields"] = recorded(name, folder)
        facts[name]["version"] = version_of(folder)
    FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def recorded(name: str, folder: Path) -> dict[str, list[str]]:
    """Return the fields of each path, from the source of a package."""
    fields = {}
    for path, (file, *kinds) in _TYPES[name].items():
        shared = _SHARED if name == "vllm" else ()
        classes: dict[str, ast.ClassDef] = {}
        for each in (*shared, file):
            tree = ast.parse((folder / each).read_text("utf-8"))
            found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            classes |= {node.name: node for node in found}
        names = {field for kind in kinds for field in fields_of(kind, classes)}
        # OpenAI writes this field into two further classes.
        if kinds[0].endswith("ParamsBase"):
            names.add("stream")
        fields[path] = sorted(names)
    return fields


def fields_of(cls: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the annotated names of a class and of its bases."""
    if cls not in classes:
        return
    for base in classes[cls].bases:
        yield from fields_of(ast.unparse(base), classes)
    for node in classes[cls].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
            yield node.target.id


def version_of(folder: Path) -> str:
    """Return the version of an installed package, by the folder of its metadata."""
    (found,) = folder.parent.glob(f"{folder.name}*-*.dist-info")
    return found.name.removesuffix(".dist-info").rpartition("-")[2]


def versions() -> Iterator[Sequence[str]]:
    """Yield a row for each compared server or client, with its version."""
    facts = json.loads(FACTS.read_text("utf-8"))
    for name, compared in _COMPARED.items():
        yield compared, f"`{facts[name]['version']}`"


def rows() -> Iterator[Sequence[str]]:
    """Yield the rows of the table: each path, and each field of the path's body."""
    facts = json.loads(FACTS.read_text("utf-8"))
    for path, body in bodies().items():
        yield cells(path, "", facts, "yes")
        if body is None:
            continue
        own = statuses(body)
        known = {name for server in facts.values() for name in server["fields"].get(path, ())}
        # Every kind of body takes the fields of all kinds that have no effect.
        worth = {name for name, status in own.items() if status != "no effect"} | known
        for name in sorted(worth - {*EVERYWHERE}):
            yield cells(path, name, facts, own.get(name, ""))


def cells(path: str, name: str, facts: Mapping[str, Any], own: str) -> Sequence[str]:
    """Return a row of the table."""

    def has(servers: Iterable[str]) -> str:
        for server in servers:
            listed = facts[server]["fields"]
            if name in listed.get(path, ()) or (not name and path in facts[server]["paths"]):
                return "yes"
            if not name and path in listed:
                return "yes"
        return ""

    others = [has([peer]) for peer in PEERS]
    return (f"`{path}`", f"`{name}`" if name else "", has(MAKERS), *others, own)


def bodies() -> dict[str, type[Body] | None]:
    """Return the type of the body by path; None for a path without a body."""
    found: dict[str, type[Body] | None] = {}
    for route in (*work.routes, *router.routes):
        path = str(getattr(route, "path", ""))
        if path == "/" or path in LEFT_OUT:
            continue
        field = getattr(route, "body_field", None)
        body = None if field is None else field.field_info.annotation
        found[path] = body or found.get(path)
    # Other names of the same endpoints need no fields of their own.
    for path in ("/v1/score", "/v1/rerank", "/v2/rerank"):
        found[path] = None
    return dict(sorted(found.items()))


def statuses(body: type[Body]) -> dict[str, str]:
    """Return what this server does with each field that it knows."""
    found = dict.fromkeys(body.without_effect, "no effect")
    for name, field in body.model_fields.items():
        found[field.alias or name] = "default only" if field.annotation is Any else "yes"
    return found


if __name__ == "__main__":
    main()
