"""The page that people see: a chat, what ran, and plots of the load, in one file that loads nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def page() -> HTMLResponse:
    """Return the page, which browsers let run its own script and call its own server, and nothing else."""
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
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


@functools.cache
def _html() -> str:
    return files("opgraft.serving.server").joinpath("page.html").read_text(encoding="utf-8")


def _digests(tag: str, html: str) -> str:
    """Return the digest of each element of a kind, by which a policy allows it."""
    texts = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    sources = []
    for text in texts:
        digest = hashlib.sha256(text.encode()).digest()
        written = base64.b64encode(digest).decode()
        sources.append(f"'sha256-{written}'")
    return " ".join(sources)
