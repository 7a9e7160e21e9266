"""Where the page is served: address and port, the path in front of it, and the proxies between it and its readers."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

FIRST_PORT = 7860
PORTS_TRIED = 20
ANY = {"0.0.0.0", "::"}
LOCAL = ("localhost", "127.0.0.1", "::1")


def choose_port(host: str, wanted: int | None) -> int:
    """The wanted port, or else the first free one from 7860. `host` is a name, an IPv4 or an IPv6 address without brackets.

    Raises:
        SystemExit: with a sentence, if the address is none of this machine's or no such port is free.
    """
    candidates = [wanted] if wanted is not None else range(FIRST_PORT, FIRST_PORT + PORTS_TRIED)
    # Gradio asks for the port on 127.0.0.1, too, before it opens it elsewhere.
    families = [(resolve(host), host), (socket.AF_INET, "127.0.0.1")]
    for port in candidates:
        if all(is_free(family, address, port) for family, address in families):
            return port
    if wanted is not None:
        sys.exit(f"Port {wanted} is in use or not allowed. Leave out --port to take the next free one.")
    sys.exit(f"The ports {candidates[0]} to {candidates[-1]} are all in use. Give another one with --port.")


def resolve(host: str) -> socket.AddressFamily:
    """IPv4 or IPv6, whichever `host` stands for here.

    Raises:
        SystemExit: with a sentence, if it is no address and no known name.
    """
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError):
        sys.exit(
            f"{host!r} is no address and no name that is known here. --host takes 127.0.0.1 (this machine alone), ::1, 0.0.0.0 or :: (every address)."
        )


def is_free(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OverflowError:
        sys.exit(f"{port} is not a port. Give a number between 1 and 65535.")
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            sys.exit(
                f"This machine has no address {host}. --host takes 127.0.0.1 (this machine alone), 0.0.0.0 (every address) or one of its own."
            )
        return False
    return True


def bare(host: str) -> str:
    """The address without the brackets in which a URL carries IPv6."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def in_url(host: str) -> str:
    """The address as it stands in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def to_open(host: str, port: int) -> str:
    """The URL to open in a browser on this machine; a page on every address is opened by name."""
    return f"http://{'localhost' if host in ANY else in_url(host)}:{port}/"


def read_root_path(text: str | None) -> str | None:
    """The path under which a proxy serves the page, as Gradio wants it: "river/" becomes "/river"; a whole URL may stand there too.

    Raises:
        SystemExit: with a sentence, if it is neither.
    """
    if text is None:
        return None
    path = text.strip().rstrip("/")
    parts = urlsplit(path)
    if parts.query or parts.fragment or any(mark.isspace() for mark in path) or (parts.scheme and parts.scheme not in ("http", "https")):
        sys.exit(
            f"{text!r} is no path to serve the page under. Give one such as --root-path /river, or the whole address https://example.com/river."
        )
    return path if parts.scheme or not path else "/" + path.lstrip("/")


def spare_the_proxy(host: str) -> None:
    """Let requests to this very page go past any proxy that the environment names.

    Gradio asks its own address before it says that it runs, and a proxy elsewhere cannot answer for that. What goes to other hosts, such as a
    model to be downloaded, still goes through the proxy.

    Raises:
        SystemExit: with a sentence, if the proxy variables cannot be read at all.
    """
    for name in ("no_proxy", "NO_PROXY"):
        known = [entry.strip() for entry in os.environ.get(name, os.environ.get(name.swapcase(), "")).split(",") if entry.strip()]
        if "*" not in known:
            os.environ[name] = ",".join(dict.fromkeys([*known, *LOCAL, *([] if host in ANY else [host])]))
    import httpx

    try:
        httpx.Client().close()
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        sys.exit(
            f"A proxy that the environment names (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) cannot be used: {str(error).rstrip('.')}. Correct or unset it."
        )


class Unbuffered:
    """ASGI middleware that asks proxies to pass event streams on as they come. nginx keeps them back by default, and the page would move in jumps."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def pass_on(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                if kind.startswith(b"text/event-stream"):
                    message["headers"] = [*message["headers"], (b"x-accel-buffering", b"no")]
            await send(message)

        await self.app(scope, receive, pass_on if scope["type"] == "http" else send)


def on_zerogpu() -> bool:
    """Whether this is a ZeroGPU Space, by the variable that its own package reads."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
