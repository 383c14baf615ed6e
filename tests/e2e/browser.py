"""Debian's Chromium for the tests of the page, driven by Playwright, and what must not happen in any of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright, ViewportSize, expect

from tests.e2e.harness import GUARD_S

CHROMIUM = Path("/usr/bin/chromium")
GUARD_MS = 1e3 * GUARD_S
PHONE = (360, 740)


def launch(playwright: Playwright) -> Browser:
    assert CHROMIUM.exists(), "these tests need Chromium: apt-get install -y --no-install-recommends chromium"
    expect.set_options(timeout=GUARD_MS)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    return playwright.chromium.launch(executable_path=CHROMIUM, args=flags)


@dataclass
class Watched:
    """A page whose errors and requests are written down."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def asked(self, path: str) -> int:
        return sum(url.endswith(path) for url in self.requests)


@contextlib.contextmanager
def opened(browser: Browser, url: str, *, dark: bool = False, size: tuple[int, int] = (1100, 900)) -> Iterator[Watched]:
    """The server's page in a profile of its own. Nothing of it may fail, or ask anybody but the server."""
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    with browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light") as context:
        context.set_default_timeout(GUARD_MS)
        watched = Watched(context.new_page())
        watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
        watched.page.on("console", lambda line: watched.errors.append(line.text) if line.type == "error" else None)
        watched.page.on("request", lambda request: watched.requests.append(request.url))
        watched.page.goto(url)
        yield watched
        assert [line for line in watched.errors if "status of 401" not in line and "status of 503" not in line] == []
        assert [asked for asked in watched.requests if not asked.startswith((url, "data:"))] == []
