"""What operators and browsers look at: health, metrics, version, and a small page about the server with its figures.

Owns those HTTP paths and the files of `web/`, read once at the start. Nothing here touches a request being served.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

from frontend.api_errors import Headers
from frontend.exposition import CONTENT_TYPE
from frontend.http_server import Exchange, Routes
from frontend.scrape import Scrape
from frontend.serving import Health, Served
from frontend.status import Status

WEB_FOLDER = Path(__file__).parent / "web"
SCRIPTS = ("page.js", "figures.js", "lanes.js", "chat.js", "access.js")
WEB_FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/web/page.css": ("page.css", b"text/css; charset=utf-8"),
    **{f"/web/{name}": (name, b"text/javascript; charset=utf-8") for name in SCRIPTS},
}
OPEN_PATHS = frozenset(("/health", "/ping", *WEB_FILES))
"""Probes bring no key, and a browser none for the page that asks for it. Every other path needs one."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no string ever becomes markup or code."""
_PAGE_HEADERS: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class StatusPages:
    """Handlers over one served model."""

    def __init__(self, served: Served, scrape: Scrape, version: str, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self._served = served
        self._scrape = scrape
        self._version = version
        self._status = Status(served, scrape, version, clock)

    def routes(self) -> Routes:
        pages = {
            path: {"GET": functools.partial(_page, (WEB_FOLDER / name).read_bytes(), kind)}
            for path, (name, kind) in WEB_FILES.items()
        }
        return {
            **pages,
            "/health": {"GET": self.health},
            "/ping": {"GET": self.health, "POST": self.health},
            "/metrics": {"GET": self.metrics},
            "/status.json": {"GET": self.status},
            "/version": {"GET": self.version},
        }

    async def health(self, exchange: Exchange) -> None:
        """200 exactly while requests are taken; the body says which state it is, and more to who is trusted."""
        health = self._served.health
        info = self._served.engine_info
        shape: dict[str, object] = {"status": health.value}
        if exchange.trusted:
            shape |= {
                "model": self._served.names[0],
                "device": None if info is None else info.device,
                "open_requests": self._served.metrics.open_requests,
            }
        await exchange.answer(msgspec.json.encode(shape), 200 if health is Health.SERVING else 503)

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.answer(await self._scrape.text(), content_type=CONTENT_TYPE.encode())

    async def status(self, exchange: Exchange) -> None:
        """What the page draws, once a second while it is looked at."""
        await exchange.answer(await self._status.json(), headers=[(b"cache-control", b"no-store")])

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer(msgspec.json.encode({"version": self._version}))


async def _page(content: bytes, content_type: bytes, exchange: Exchange) -> None:
    await exchange.answer(content, content_type=content_type, headers=_PAGE_HEADERS)
