"""`greenlane trace` on a small log of known times: figures by value, files that open, and logs that are damaged."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from frontend.cli import app
from frontend.trace.chrome import chrome_trace
from frontend.trace.picture import draw
from frontend.trace.png import SCALE, render_png
from frontend.trace.read import Run, TraceError, read_runs
from frontend.trace.scene import PALETTE, Rect, Scene, Text
from frontend.trace.strokes import strokes
from frontend.trace.summary import Spread, summarize
from frontend.trace.svg import render_svg

LOG = Path(__file__).resolve().parents[1] / "fixtures" / "steps-green.jsonl"
"""The second of two workers: a step of chunks (6 ms), decode steps of 3 ms, of 5 ms beside two prefills (2048 tokens in
22 ms, 1000 in 6), 10 µs apart, 30 before a join of 100; the last line is cut off."""
SVG = "{http://www.w3.org/2000/svg}"


def run() -> Run:
    return read_runs(LOG)[-1]


def written(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def header(**changes: Any) -> dict[str, Any]:
    return {**json.loads(LOG.read_text().splitlines()[0]), **changes}


def test_what_auto_gave_its_batches(tmp_path: Path) -> None:
    """Red when a log of `auto` is said to have had the header's split throughout."""
    launches = [
        {"event": "prefill_launch", "step": step, "at": step, "rows": 1, "chunk_tokens": 64, "decode_sms": sms}
        for step, sms in enumerate((48, 40, 48), 1)
    ]
    (only,) = read_runs(written(tmp_path, header(overlap="auto", decode_sms=72, prefill_sms=60), *launches))
    assert only.split() == "40, 48 of 132 SMs decode"
    assert run().split() == f"{run().header.decode_sms} SMs decode + {run().header.prefill_sms} prefill"


# ------------------------------ figures


def test_the_figures_of_a_known_log() -> None:
    """Red when a step is put in the wrong class, a completion outside a prefill counts as inside, a join counts as idle
    time, or a gap ahead of a step without decode rows does."""
    summary = summarize(run())
    assert summary.steps == 21
    assert summary.decode_alone_ms == Spread(13, 3.0, 3.0)
    assert summary.decode_beside_ms == Spread(7, 5.0, 5.0)
    assert (summary.mixed_ms.count, summary.chunks_alone_ms) == (0, Spread(1, 6.0, 6.0))
    assert [(row.tokens, row.count, row.ms_p50, row.inside_min) for row in summary.prefills] == [
        (1024, 1, 6.0, 1),
        (2048, 1, 22.0, 4),
    ]
    assert (summary.prefill_launches, summary.inside_min, summary.inside_median) == (2, 1, 2.5)
    assert summary.gpu_idle_us.count == 20
    assert (summary.gpu_idle_us.p50, summary.gpu_idle_us.p99) == (10.0, 30.0)
    assert (summary.host_us.p50, summary.host_us.p99) == (200.0, 600.0)
    assert (summary.failed, summary.dropped, summary.unreadable) == (1, 3, 1)


def test_a_step_counts_as_beside_by_its_time_too(tmp_path: Path) -> None:
    """Red when only the host's word decides: a step launched alone may still share the GPU with a later prefill."""
    step = {"event": "decode", "decode_rows": 1, "chunk_tokens": 0, "beside": False}
    path = written(
        tmp_path,
        header(),
        {**step, "step": 1, "start": 0.0, "end": 100.0},
        {**step, "step": 2, "start": 100.0, "end": 200.0},
        {**step, "step": 3, "start": 250.0, "end": 300.0},
        {"event": "complete", "step": 2, "start": 150.0, "end": 250.0, "rows": 1, "chunk_tokens": 8},
    )
    summary = summarize(read_runs(path)[0])
    assert (summary.decode_alone_ms.count, summary.decode_beside_ms.count) == (2, 1)


def test_a_prefill_of_an_exact_power_of_two_stays_in_its_row() -> None:
    """Red when 2048 tokens are told under 4096."""
    assert {row.tokens for row in summarize(run()).prefills} == {1024, 2048}


# ------------------------------ reading


def test_every_worker_s_life_is_told_apart() -> None:
    """Red when a restart's lines are mixed into the ones before: their times begin anew."""
    assert [len(each.decodes) for each in read_runs(LOG)] == [1, 21]


def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    """Red when a line that was cut off, or is no event, ends the reading."""
    lines = LOG.read_text().splitlines()
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join([*lines[:8], '{"event":"nap","at":1}', "\x00\x01", *lines[8:]]))
    assert (len(read_runs(path)[-1].decodes), read_runs(path)[-1].unreadable) == (21, 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is empty"),
        ("hello\n", "doesn't start with a header"),
        (json.dumps({**header(), "version": 2}), "of version 2; this greenlane reads 1"),
    ],
)
def test_what_is_no_step_log_is_refused(tmp_path: Path, text: str, named: str) -> None:
    """Red when another file, or a log of another version, is read as if it were one."""
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=named):
        read_runs(path)


# ------------------------------ the files


def test_the_chrome_trace_holds_every_span_on_its_track() -> None:
    """Red when a lane's work is missing, on another track, or has another length than in the log."""
    trace = json.loads(json.dumps(chrome_trace(run())))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert named == {1: "primary lane", 2: "prefill lane", 3: "host"}
    assert sum(event["tid"] == 1 for event in spans) == 21 + 2
    assert [(event["name"], event["dur"]) for event in spans if event["tid"] == 2] == [
        ("prefill of 2048", 22000.0),
        ("prefill of 1000", 6000.0),
    ]
    assert {event["name"] for event in spans if event["tid"] == 3} == {"launch", "wait", "idle"}


def test_the_svg_stands_alone_in_both_themes() -> None:
    """Red when the SVG is no XML, refers to anything outside, lacks a colour of a theme, or misses a bar."""
    text = render_svg(draw(run()))
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "prefers-color-scheme: dark" in text
    assert all(light in text and dark in text for light, dark in PALETTE.values())
    assert "href" not in text
    assert "url(" not in text
    bars = [rect.get("class") for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert bars.count("prefill") == 2
    assert bars.count("beside") == 7
    assert "2048 tokens · 22.0 ms" in [node.text for node in root.iter(f"{SVG}text")]


def test_text_of_the_log_can_t_break_the_svg() -> None:
    """Red when a model's name is written into the markup as it is."""
    named = run()
    named.header.model = "<script>&\"'"
    root = ElementTree.fromstring(render_svg(draw(named)))
    assert any("<script>" in (node.text or "") for node in root.iter(f"{SVG}text"))


def pixels(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[height, width, 3] of a PNG with one IDAT chunk and unfiltered rows; every checksum is checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length) == (zlib.crc32(kind + data),)
        chunks[kind] = data
        at += 12 + length
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour, list(chunks)) == (8, 2, [b"IHDR", b"IDAT", b"IEND"])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_the_png_shows_the_bars_in_their_colours() -> None:
    """Red when the PNG isn't one, or a bar isn't where the scene has it."""
    scene = draw(run())
    image = pixels(render_png(scene))
    assert image.shape == (round(scene.height * SCALE), round(scene.width * SCALE), 3)
    bars = [shape for shape in scene.shapes if isinstance(shape, Rect) and shape.title and shape.width > 4]
    assert {bar.role for bar in bars} >= {"decode", "beside", "mixed", "prefill", "wait"}
    for bar in bars:
        if bar.role != "wait":  # lies under the launches
            corner = image[round((bar.y + 2) * SCALE), round((bar.x + 2) * SCALE)]
            assert "#" + bytes(corner).hex() == PALETTE[bar.role][0], bar


def test_the_png_s_text_is_ink_within_the_canvas() -> None:
    """Red when text draws nothing, or a text that hangs over an edge fails or wraps around."""
    scene = Scene(60, 30, "", [Text(30, 20, "Ag9", "ink", 12, "middle"), Text(-40, 20, "long text", "ink")])
    image = pixels(render_png(scene)).astype(int)
    dark = np.argwhere(image.sum(axis=2) < 100)
    assert len(dark) > 40
    assert dark[:, 1].min() > 5
    alone = Scene(60, 30, "", [Text(55, 20, "wide", "ink"), Text(5, 2, "high", "ink"), Text(5, 60, "low", "ink")])
    assert pixels(render_png(alone)).shape == (60, 120, 3)


def test_every_character_of_a_picture_has_a_glyph() -> None:
    """Red when a word of the product's own shows as boxes."""
    texts = "".join(shape.text for shape in draw(run()).shapes if isinstance(shape, Text))
    box = strokes("\x00")
    assert [character for character in sorted(set(texts)) if strokes(character) == box] == []


def test_all_that_is_drawn_lies_within_the_picture() -> None:
    """Red when a bar or the legend runs over the edge."""
    scene = draw(run())
    for shape in scene.shapes:
        if isinstance(shape, Rect):
            assert shape.x >= 0
            assert shape.x + shape.width <= scene.width
        if isinstance(shape, Text) and shape.anchor == "start":
            assert shape.x + 6.3 * len(shape.text) * shape.size / 11 <= scene.width, shape.text


@pytest.mark.parametrize("overlap", ["off", "stream"])
def test_a_run_without_a_prefill_lane_is_drawn(tmp_path: Path, overlap: str) -> None:
    """Red when the stretch or the layout needs a prefill."""
    step = {"event": "decode", "decode_rows": 1, "chunk_tokens": 0, "beside": False}
    steps = [{**step, "step": place, "start": 10.0 * place, "end": 10.0 * place + 9} for place in range(3)]
    scene = draw(read_runs(written(tmp_path, header(overlap=overlap), *steps))[0])
    labels = [shape.text for shape in scene.shapes if isinstance(shape, Text)]
    assert "primary lane" in labels
    assert "prefill lane" not in labels


# ------------------------------ the command


def test_the_command_writes_three_files_and_ends_with_a_json_line(tmp_path: Path) -> None:
    """Red when a file is missing, or a program can't read the last line."""
    result = CliRunner().invoke(app, ["trace", str(LOG), "--out", str(tmp_path / "lanes")])
    assert result.exit_code == 0, result.output
    assert "decode beside a prefill" in result.output
    assert "the last of 2 workers" in result.output
    line = json.loads(result.output.splitlines()[-1])
    assert (line["decode_beside_ms_p50"], line["inside_min"], line["overlap"]) == (5.0, 1, "green")
    assert line["files"] == [str(tmp_path / f"lanes.{kind}") for kind in ("trace.json", "svg", "png")]
    assert all(Path(path).stat().st_size for path in line["files"])


def test_files_are_named_after_the_log(tmp_path: Path) -> None:
    """Red when the default name is lost, or overwrites the log."""
    log = tmp_path / "steps.jsonl"
    log.write_bytes(LOG.read_bytes())
    assert CliRunner().invoke(app, ["trace", str(log)]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "steps.jsonl",
        "steps.png",
        "steps.svg",
        "steps.trace.json",
    ]
    assert log.read_bytes() == LOG.read_bytes()


def test_the_command_says_what_it_can_t_do(tmp_path: Path) -> None:
    """Red when an impossible call ends in a traceback or with status 0."""
    invoke = CliRunner().invoke
    missing = invoke(app, ["trace", str(tmp_path / "none.jsonl")])
    assert (missing.exit_code, "none.jsonl can't be read" in missing.output) == (2, True)
    empty = invoke(app, ["trace", str(written(tmp_path, header()))])
    assert (empty.exit_code, "send it a request" in empty.output) == (1, True)
    nowhere = invoke(app, ["trace", str(LOG), "--out", str(tmp_path / "no" / "lanes")])
    assert (nowhere.exit_code, "lanes.trace.json can't be written" in nowhere.output) == (2, True)
