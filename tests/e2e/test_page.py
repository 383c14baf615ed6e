"""The page at `/` in a real browser: figures, playground, a killed worker, themes, a phone, a keyboard, keys."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.certificates import key_file
from tests.e2e.browser import PHONE, launch, opened
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import OpenCall, Server, long_request, until

pytestmark = pytest.mark.e2e

CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = channels(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
    if (!own || element.checkVisibility?.() === false || element.disabled) continue;
    const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.id} ${element.textContent.trim()}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Visible texts with less than the 4.5 : 1 of WCAG 2.2 AA against what is behind them."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


def say(page: Page, text: str, most: int = 64) -> None:
    """Send it, to be answered greedily: the model of the tests then finds no end by itself."""
    page.locator("#max-tokens").fill(str(most))
    page.locator("#temperature").fill("0")
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")


def tab_to(page: Page, identity: str) -> None:
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == identity:
            return
    raise AssertionError(f"{identity} can't be reached by keyboard")


def text_of(page: Page, identity: str) -> str:
    return page.locator(f"#{identity}").inner_text()


def test_it_shows_what_the_server_does(server: Server, browser: Browser) -> None:
    """Red if a figure isn't the server's own, a lane stays empty while it computes, or the page asks while nobody
    looks."""
    with opened(browser, server.http) as watched:
        page = watched.page
        expect(page.locator("#health")).to_have_text("serving")
        expect(page.locator("#model")).to_have_text("tiny")
        call = OpenCall(server.grpc, long_request(max_tokens=1200))
        expect(page.locator("#running")).to_have_text("1 of 64")
        expect(page.locator("#open")).to_have_text("1")
        until(lambda: page.locator("#primary rect").count() >= 2, "the primary lane is drawn")
        assert page.locator("#rate rect").count() >= 1
        expect(page.locator("#itl-50")).to_contain_text("ms")
        call.join()
        expect(page.locator("#running")).to_have_text("0 of 64")
        stats = server.stats()
        total, kept = stats.gauges.pages_total, stats.gauges.pages_cached
        expect(page.locator("#held")).to_have_text(f"0 of {total:,}")
        expect(page.locator("#kept")).to_have_text(f"{kept:,}")
        page.evaluate("""() => {
          Object.defineProperty(document, "hidden", { value: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""")
        page.wait_for_timeout(1200)
        before = watched.asked("/status.json")
        assert before >= 3
        page.wait_for_timeout(2500)
        assert watched.asked("/status.json") == before


def test_a_lane_of_its_own(make_server: MakeServer, browser: Browser) -> None:
    """Red if the split in force isn't told, or what the prefill lane computes isn't drawn there."""
    server = make_server("--device=fake", "--decode-overlap=green", "--decode-sms=48")
    with opened(browser, server.http) as watched:
        page = watched.page
        expect(page.locator("#split")).to_contain_text("48 SMs decode, 84 prefill")
        expect(page.locator("#primary-work")).to_have_text("decode")
        call = OpenCall(server.grpc, long_request(max_tokens=1900))
        OpenCall(server.grpc, long_request("It is a truth " * 300, max_tokens=1)).join()
        until(lambda: page.locator("#prefill rect").count(), "the prefill lane is drawn")
        expect(page.locator("#prefill-now")).to_contain_text("% busy")
        call.join()


def test_figures_follow_from_counters(server: Server, browser: Browser) -> None:
    """Red if a percentile leaves its bucket, work that ended late isn't spread over the time it took, or a restart of
    the engine core is taken for work."""
    with opened(browser, server.http) as watched:
        found = watched.page.evaluate("""async () => {
          const { History, quantile } = await import("/web/figures.js");
          const bounds = [1, 2, 4];
          const counters = (busy, tokens) => ({
            primary_busy_us: busy * 1e6, prefill_busy_us: 0, output_tokens: tokens,
            steps_decode: tokens, steps_prefill: 0, steps_mixed: 0,
          });
          const sample = (uptime_s, busy, tokens, instance_id) => ({
            about: { instance_id }, engines: { answered: 1 }, engine: { uptime_s, counters: counters(busy, tokens) },
            ttft: { counts: [tokens, 0] },
          });
          const history = new History();
          const lives = [[1, 0, 0, "a"], [2, 0, 5, "a"], [3, 1.5, 10, "a"], [4, 1.75, 12, "b"], [5, 2.25, 16, "b"]];
          lives.forEach((each, at) => history.add(sample(...each), at));
          return {
            quantiles: [0, 0.5, 0.75, 1].map((q) => quantile(bounds, [2, 2, 0, 0], q)),
            beyond: String(quantile(bounds, [0, 0, 0, 1], 0.5)), none: quantile(bounds, [0, 0, 0, 0], 0.5),
            primary: history.intervals().map((each) => each.primary), tokens: history.growth("output_tokens"),
            observed: history.observed("ttft"),
          };
        }""")
    assert found["quantiles"] == [0, 1, 1.5, 2]
    assert (found["beyond"], found["none"]) == ("Infinity", None)
    assert found["primary"] == [0.5, 1.0, 0.5]
    assert (found["tokens"], found["observed"]) == (14, [16, 0])


def test_the_playground_by_keyboard(server: Server, browser: Browser) -> None:
    """Red if an answer doesn't stream, its tokens aren't timed, what is said becomes markup, or Escape leaves its
    request running."""
    with opened(browser, server.http) as watched:
        page = watched.page
        page.evaluate("""() => {
          const lengths = (window.lengths = new Set());
          const note = () => lengths.add(document.getElementById("log").textContent.length);
          new MutationObserver(note).observe(document.getElementById("log"), { characterData: true, subtree: true });
        }""")
        tab_to(page, "temperature")
        page.keyboard.type("0")
        tab_to(page, "message")
        page.keyboard.type("<img src=x onerror=alert(1)> hello")
        page.keyboard.press("Enter")
        expect(page.locator("#timings")).to_contain_text("256 tokens")
        expect(page.locator("#send")).to_be_enabled()
        assert page.evaluate("window.lengths.size") > 40, "the answer came in a few pieces"
        assert page.locator('#log p[data-role="user"]').inner_text() == "<img src=x onerror=alert(1)> hello"
        assert page.locator("#log img").count() == 0
        assert "between tokens p50" in text_of(page, "timings")
        assert page.locator("#gaps rect").count() > 40
        aborted = server.stats().counters.finished_abort
        say(page, "Go on", 1500)
        answer = page.locator('#log p[data-role="assistant"]').last
        until(answer.inner_text, "the second answer has begun")
        page.keyboard.press("Escape")
        expect(page.locator("#send")).to_be_enabled()
        until(server.idle, "the stopped answer is no longer computed")
        assert server.stats().counters.finished_abort == aborted + 1
        page.locator("#clear").press("Enter")
        assert text_of(page, "log") == ""


def test_a_kill_and_the_recovery(make_server: MakeServer, browser: Browser) -> None:
    """Red if the page goes on as if nothing had happened, hides why an answer ended, or needs a reload afterwards."""
    server = make_server()
    with opened(browser, server.http) as watched:
        page = watched.page
        say(page, "Tell me all of it", 1800)
        until(page.locator('#log p[data-role="assistant"]').inner_text, "an answer is on its way")
        os.kill(server.pid("worker"), signal.SIGKILL)
        expect(page.locator('#log p[data-role="error"]')).to_contain_text("was killed by SIGKILL")
        expect(page.locator("#health")).to_have_text("starting")
        expect(page.locator("#events li").first).to_contain_text("starting")
        expect(page.locator(".lanes")).to_contain_class("stale")
        expect(page.locator("#health")).to_have_text("serving")
        expect(page.locator("#events")).to_contain_text("the engine core was started again")
        expect(page.locator(".lanes")).not_to_contain_class("stale")
        say(page, "And now?", 16)
        expect(page.locator("#timings")).to_contain_text("16 tokens")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1100, 900), PHONE, (320, 568)], ids=lambda size: str(size[0]))
def test_themes_and_widths(server: Server, browser: Browser, dark: bool, size: tuple[int, int]) -> None:
    """Red if a text is hard to read in one of the themes, something is wider than the window, or a control can't be
    reached, or not be seen to be, by keyboard."""
    with opened(browser, server.http, dark=dark, size=size) as watched:
        page = watched.page
        say(page, "Hello", 8)
        expect(page.locator("#timings")).to_contain_text("8 tokens")
        expect(page.locator("#send")).to_be_enabled()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        page.evaluate("document.activeElement.blur()")
        seen: dict[str, str] = {}
        for _ in range(20):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                "[document.activeElement.id || document.activeElement.getAttribute('href'),"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            if name:
                seen[name] = outline
        wanted = {"clear", "log", "message", "max-tokens", "temperature", "send", "/metrics"}
        assert wanted <= seen.keys()
        assert set(seen.values()) == {"solid"}


def test_a_server_with_keys(make_server: MakeServer, browser: Browser, tmp_path: Path) -> None:
    """Red if the page shows anything without the key, accepts a wrong one, keeps the right one beyond its tab, or goes
    on asking without one."""
    server = make_server(f"--api-key-file={key_file(tmp_path, 'the-key')}")
    with opened(browser, server.http) as watched:
        page = watched.page
        expect(page.locator("#key")).to_be_focused()
        assert text_of(page, "model") == "–"
        page.wait_for_timeout(2500)
        assert watched.asked("/status.json") == 1
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("That key is not accepted.")
        page.keyboard.type("the-key")
        page.keyboard.press("Enter")
        expect(page.locator("#health")).to_have_text("serving")
        expect(page.locator("#key-form")).to_be_hidden()
        say(page, "Hello", 8)
        expect(page.locator("#timings")).to_contain_text("8 tokens")
        page.reload()
        expect(page.locator("#health")).to_have_text("serving")
        kept = page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert kept == [["the-key"], 0, ""]
        assert not any("the-key" in url for url in watched.requests)
        other = page.context.new_page()
        other.goto(server.http)
        expect(other.locator("#key")).to_be_focused()
