"""``opgraft top``: the load of a running server, from its metrics. Imports no torch."""

from __future__ import annotations

import functools
import http.client
import importlib
import math
import time
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import click
from opgraft.base.text import described
from opgraft.cli.output import (
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    width,
    with_settings,
)
from opgraft.cli.readings import Load, Reading, load_between
from opgraft.errors import InputError
from opgraft.registry.state import host_state

_ANSWER_SECONDS = 30
"""A server that answers later hangs."""

_LONGEST_INTERVAL = 3600

_LARGEST = 1 << 24  # bytes of the metrics
_SHORT = {
    "server.host": "--host",
    "server.port": "--port",
    "server.api_key_file": "--api-key-file",
}
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not bound
"""Addresses that servers listen on, and that no client can ask → the address of this machine."""

_CLEAR = "\x1b[2J\x1b[H"
_NONE = "-"


class _Seconds(click.FloatRange):
    """A number in a range. Python's ``nan`` is in none, but compares as if it was."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number.

        Raises:
            BadParameter: there is no such number in the range.
        """
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return number


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: another server would get the key."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Return nothing, so that the redirect is an error."""


@click.command("top", cls=SettingsCommand)
@click.argument("url", required=False)
@click.option("--api-key", metavar="KEY", help="If the server asks for one.")
@click.option(
    "--interval",
    type=_Seconds(min=0, min_open=True, max=_LONGEST_INTERVAL),
    default=2.0,
    show_default=True,
    help="Seconds from one reading to the next.",
)
@click.option("--once", is_flag=True, help="Show one interval, and end. So does --json.")
@json_option
@functools.partial(with_settings, short=_SHORT)
def command(
    url: str | None, api_key: str | None, interval: float, once: bool, as_json: bool
) -> None:
    """Show the load of the server at URL: requests, cache, tokens per second, ops and kernels.

    Without URL, server.host and server.port say where the server is. Ctrl-C ends the command.
    """
    address = _address() if url is None else url.rstrip("/")
    server = _Server(address, api_key or _key_of_file())
    try:
        former = server.read()
        if not (once or as_json):
            _watch(server, address, former, interval)
        time.sleep(interval)
        load = load_between(former, server.read())
    except KeyboardInterrupt:
        # The usual end.
        echo()
        return
    if as_json:
        print_json("opgraft.top/1", {"url": address, **load.to_dict()})
    else:
        _show(address, load)


def _watch(server: _Server, address: str, former: Reading, interval: float) -> NoReturn:
    """Show the load of a server after each interval, until the command is interrupted."""
    while True:
        time.sleep(interval)
        try:
            present = server.read()
        except InputError as error:
            # A server that is started anew answers again after a while.
            print_wrapped(str(error))
            continue
        # A terminal shows the newest interval only.
        if width() is not None:
            echo(_CLEAR)
        _show(address, load_between(former, present))
        former = present


def _address() -> str:
    server = host_state().settings().config.server
    host = _EVERY_ADDRESS.get(server.host, server.host)
    # A URL has an IPv6 address in brackets.
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def _key_of_file() -> str | None:
    """Return the first key of ``server.api_key_file``; ``None`` without this setting.

    Raises:
        ConfigError: the file cannot be used.
    """
    path = host_state().settings().config.server.api_key_file
    if path is None:
        return None
    # The package of the server imports nothing else.
    from opgraft.serving.server.keys import read_keys

    return read_keys(path, "server.api_key_file")[0]


class _Server:
    """A running server.

    Args:
        url: without a path.
        key: of the client, if the server asks for one.

    Raises:
        InputError: the URL is none, or ``prometheus_client`` is not installed.
    """

    def __init__(self, url: str, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url!r:.80} is no URL of a server: give one like http://host:8000")
        self._url = f"{url}/metrics"
        self._opener = urllib.request.build_opener(_SameServer)
        self._headers = {}
        if key is not None:
            # The library shows the header in the error about a line break.
            if any(unicodedata.category(each) == "Cc" for each in key):
                raise InputError(
                    "the API key has a line break or another control character, and cannot be "
                    "sent: see --api-key"
                )
            # Servers read UTF-8, and the library writes latin-1.
            sent = key.encode("utf-8", "surrogateescape").decode("latin-1")
            self._headers["Authorization"] = f"Bearer {sent}"
        try:
            self._parser: Any = importlib.import_module("prometheus_client.parser")
        except ImportError as error:
            raise InputError(
                f"metrics cannot be read ({error}): pip install 'opgraft[metrics]'"
            ) from error

    def read(self) -> Reading:
        """Read the metrics.

        Raises:
            InputError: no server answers, or another one than opgraft's.
        """
        try:
            request = urllib.request.Request(self._url, headers=self._headers)  # noqa: S310
            with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                found = answer.read(_LARGEST + 1)
        except urllib.error.HTTPError as error:
            step = "see that the URL is right"
            if error.code in (401, 403):
                is_given = bool(self._headers)
                step = "its keys have no such key" if is_given else "give --api-key"
            elif error.code in range(300, 400):
                step = "it redirects, so give the final URL"
            raise InputError(f"{self._url} answers with the status {error.code}: {step}") from error
        except http.client.InvalidURL as error:
            raise InputError(
                f"{self._url!r:.80} is no URL of a server ({described(error)}): give one like "
                "http://host:8000"
            ) from error
        # Other programs than servers of HTTP answer with anything.
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InputError(
                f"no server answers at {self._url} ({described(error)}): start one by 'opgraft "
                "serve', or give its URL"
            ) from error
        moment = time.monotonic()
        if len(found) > _LARGEST:
            raise self._stranger(f"over {_LARGEST >> 20} MiB of metrics")
        text = found.decode("utf-8", "replace")
        try:
            samples = [
                (sample.name, sample.labels, sample.value)
                for family in self._parser.text_string_to_metric_families(text)
                for sample in family.samples
            ]
            return Reading(moment, samples)
        except ValueError as error:
            raise self._stranger("no metrics of a model") from error

    def _stranger(self, fault: str) -> InputError:
        return InputError(f"{self._url} has {fault}: give the URL of an 'opgraft serve'")


def _show(url: str, load: Load) -> None:
    """Print the load of the server at a URL."""
    print_wrapped(f"{load.model} at {url}, in {load.seconds:.1f} s")
    header = ("engine", "running", "waiting", "cache", "prompt tokens/s", "output tokens/s")
    rows = [
        (
            engine.engine,
            f"{engine.running:g}",
            f"{engine.waiting:g}",
            f"{engine.cache_usage:.1%}",
            f"{engine.prompt_tokens_per_second:.1f}",
            f"{engine.output_tokens_per_second:.1f}",
        )
        for engine in load.engines
    ]
    print_table(header, rows)
    echo()
    print_wrapped(f"mean times: {', '.join(_times(load.mean_seconds))}")
    print_wrapped(f"step: {', '.join(_shares(load.shares_of_step))}")
    print_wrapped(f"ops: {', '.join(_shares(load.shares_of_ops))}")
    echo()
    print_table(
        ("op", "kernel", "provider"), [(row.op, row.kernel, row.provider) for row in load.kernels]
    )


def _times(means: Mapping[str, float | None]) -> Iterator[str]:
    for name, seconds in means.items():
        shown = _NONE if seconds is None else f"{seconds * 1e3:.3g} ms"
        yield f"{name.replace('_', ' ')} {shown}"


def _shares(shares: Mapping[str, float]) -> Sequence[str]:
    found = [f"{part} {share:.1%}" for part, share in shares.items()]
    return found or [_NONE]
