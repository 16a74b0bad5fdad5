"""The page for people: a chat, decisions and plots of the load. The file loads no other file."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def page() -> HTMLResponse:
    """Return the page. Browsers allow only the page's own script and calls to this server."""
    html = _html()
    policy = {
        "default-src": "'none'",
        "script-src": _digests("script", html),
        "style-src": _digests("style", html),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    rules = [f"{name} {value}" for name, value in policy.items()]
    headers = {
        "content-security-policy": "; ".join(rules),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


@functools.cache
def _html() -> str:
    return files("opgraft.serving.server").joinpath("page.html").read_text(encoding="utf-8")


def _digests(tag: str, html: str) -> str:
    """Return the digests of all elements of a kind, in the form of the policy."""
    texts = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    sources = []
    for text in texts:
        digest = hashlib.sha256(text.encode()).digest()
        written = base64.b64encode(digest).decode()
        sources.append(f"'sha256-{written}'")
    return " ".join(sources)
