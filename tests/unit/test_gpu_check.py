"""The GPU check's own logic, which must be right before a GPU is there: modes, what a step log shows, the files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check
from scripts.bench import make_shape
from scripts.gpu import itl, masks, overlap, rows
from scripts.gpu.options import Mode, Options, parse_mode, parse_row, server_flags

OPTIONS = Options(
    device="cuda",
    out=Path("out"),
    work=Path("work"),
    shape="4b",
    modes=(),
    rows=(),
    injected_s=10.0,
    undisturbed_s=4.0,
    repeats=1,
)


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        ("off-256", Mode("off-256", "off", None, 256)),
        ("stream", Mode("stream", "stream", None, None)),
        ("green-48", Mode("green-48", "green", 48, None)),
        ("green-24-4096", Mode("green-24-4096", "green", 24, 4096)),
        ("off+unstaged", Mode("off+unstaged", "off", None, None, ("--staged-inputs=off",))),
        ("auto+frontends2", Mode("auto+frontends2", "auto", None, None, ("--frontends=2",))),
        ("off-512+depth3", Mode("off-512+depth3", "off", None, 512, ("--async-depth=3",))),
    ],
)
def test_modes(label: str, mode: Mode) -> None:
    """Red when a label is measured as another mode than it says: a table of wrong names."""
    assert parse_mode(label) == mode
    flags = server_flags(OPTIONS, mode)
    assert f"--decode-overlap={mode.overlap}" in flags
    assert [flag for flag in flags if flag.startswith(("--staged", "--async", "--frontends"))] == [*mode.flags]
    assert (f"--max-num-batched-tokens={mode.chunk}" in flags) == (mode.chunk is not None)
    assert (f"--decode-sms={mode.decode_sms}" in flags) == (mode.decode_sms is not None)


@pytest.mark.parametrize("label", ["green", "of-256", "stream-", "green-48-", ""])
def test_modes_that_are_none(label: str) -> None:
    """Red when a misspelt mode is taken for another."""
    with pytest.raises(argparse.ArgumentTypeError):
        parse_mode(label)


def test_every_row_has_a_name_that_is_taken() -> None:
    """Red when a load of the tables is refused."""
    for name in (*itl.ROWS, *rows.ROWS, "16@4096@0.5", "1.5/s"):
        assert parse_row(name) == name


@pytest.mark.parametrize("name", ["16@x@4", "16@4096", "c8@", "c", "8/", "goodput", "@", ""])
def test_rows_that_are_none(name: str) -> None:
    """Red when a misspelt load is noticed only after a server has started."""
    with pytest.raises(argparse.ArgumentTypeError, match="is no load"):
        parse_row(name)


def done(event: str, step: int, start: float, end: float, *, tokens: int = 0, beside: bool = False) -> dict[str, Any]:
    return {"event": event, "step": step, "start": start, "end": end, "chunk_tokens": tokens, "beside": beside}


ITL_FILE = gpu_check.LOADS["itl"][0]


def test_overlap_counts_only_what_completed_inside(tmp_path: Path) -> None:
    """Red when a decode step that began before a prefill, or ended after it, counts as inside; when short prefills
    count; or when the idle time before a launch isn't compared with the usual one."""
    lines = [
        {"event": "header", "clock": "gpu", "decode_sms": 48, "prefill_sms": 84},
        {"event": "prefill_launch", "step": 3},
        done("decode", 1, 0.0, 1000.0),
        done("decode", 2, 1100.0, 2100.0),
        done("decode", 3, 2700.0, 4700.0, beside=True),
        done("decode", 4, 4800.0, 6800.0, beside=True),
        done("decode", 5, 6900.0, 8900.0, beside=True),
        done("complete", 3, 2600.0, 7000.0, tokens=2048),
        done("complete", 9, 0.0, 9000.0, tokens=512),
    ]
    log = tmp_path / "steps.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = overlap.read(log)
    assert found["inside"] == [2]
    assert found["launch_gap_over_usual_ms"]["max"] == pytest.approx(0.5)
    assert found["decode_alone_ms"]["p50"] == 1.0
    assert found["decode_beside_ms"]["p50"] == 2.0
    assert any("fewer than 3" in what for what in overlap.broken({"load": {}, **found}))


def row(label: str, name: str, p50: float, p99: float) -> dict[str, Any]:
    figures = {"itl_p50_ms": p50, "itl_p99_ms": p99, "itl_max_ms": p99, "decode_tok_s": 1.0, "ttft_p50_ms": None}
    return {"row": name, "label": label, "decoders": 16, "decoders_alive": 16, **figures}


def test_table_compares_with_the_undisturbed_off_server() -> None:
    """Red when a row's p99 is set against its own mode's pace, or an older line of the same row is shown."""
    lines = [
        row("off-2048", "16", 4.0, 5.0),
        row("green-48", "16", 5.0, 9.0),
        row("green-48", "16@4096@2", 5.0, 99.0),
        row("green-48", "16@4096@2", 5.0, 6.0),
        {"row": "start", "label": "stream", "error": "the server didn't start"},
    ]
    text = itl.table(lines)
    (line,) = [line for line in text if line.startswith("16@4096@2")]
    assert line.split()[-1] == "1.50"
    assert any("failed" in line for line in text)


def test_sections_are_replaced_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a run of one section loses the committed results of the others, or keeps its own old ones."""
    committed, out = tmp_path / "committed", tmp_path / "out"
    committed.mkdir()
    out.mkdir()
    monkeypatch.setattr(gpu_check, "RESULTS", committed)
    gpu_check.record_smoke(committed, "idle", {"about": {"commit": "a"}, "broken": [], "share": 1})
    gpu_check.record_smoke(out, "smoke", {"about": {"commit": "b"}, "broken": ["x"], "green": {"requests": 7}})
    gpu_check.record_smoke(out, "idle", {"about": {"commit": "c"}, "broken": [], "share": 2})
    results = json.loads((out / gpu_check.SMOKE).read_text())
    assert results["green"] == {"requests": 7}
    assert results["idle"] == {"share": 2}
    assert results["about"] == {"idle": {"commit": "c", "broken": []}, "smoke": {"commit": "b", "broken": ["x"]}}


def test_mixed_load_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a later run of some modes loses the earlier ones, or `--fresh` keeps them."""
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "none")
    options = argparse.Namespace(out=tmp_path, work=tmp_path, shape=None, fresh=False)
    about = {"commit": "a", "seconds": 1.0}
    assert gpu_check.record_load("itl", options, about, [row("off-256", "16", 4.0, 5.0)], "")
    assert not gpu_check.record_load("itl", options, about, [{"row": "16", "label": "stream", "error": "no"}], "")
    labels = [json.loads(line).get("label") for line in (tmp_path / ITL_FILE).read_text().splitlines()]
    assert labels == [None, "off-256", None, "stream"]
    options.fresh = True
    assert not gpu_check.record_load("itl", options, about, [], "took too long")
    assert len((tmp_path / ITL_FILE).read_text().splitlines()) == 1


def test_masks_are_judged() -> None:
    """Red when an answer that doesn't fit, a missing kind or a lost pace passes, or a CPU's pace is judged."""
    itl = {"free_before": {"p50": 2.0}, "constrained": {"p50": 2.1}, "free_after": {"p50": 2.0}}
    well = {"itl_ms_beside": itl, "answers": dict.fromkeys(("json_schema", "regex", "choice"), 3), "misfits": []}
    well["log_complaints"] = []
    slow = well | {"itl_ms_beside": itl | {"constrained": {"p50": 2.3}}}
    assert masks.broken(well, timed=True) == masks.broken(slow, timed=False) == []
    for worse in (
        slow,
        well | {"misfits": ["x"]},
        well | {"answers": {"regex": 3}},
        well | {"log_complaints": ["Xid"]},
    ):
        assert len(masks.broken(worse, timed=True)) == 1
    fits = {name: fit for name, _, fit in masks.KINDS}
    assert fits["json_schema"]('{"name": "a", "age": 7, "moods": ["gay"], "married": false}')
    assert not fits["json_schema"]('{"name": "a", "age": 151, "moods": ["gay"], "married": false}')
    assert not fits["json_schema"]('{"name": "a", "age": 15')
    assert fits["regex"]("ABC-1234 ab cd")
    assert not fits["regex"]("ABC-1234 ab cd!")


def test_the_masks_vocabulary_is_the_shapes() -> None:
    """Red when ids beyond the tokenizer could be drawn, eos isn't where the shape has it, or text doesn't survive."""
    tokenizer = masks.byte_tokenizer(make_shape.VOCABULARY)
    assert tokenizer.get_vocab_size() == make_shape.VOCABULARY
    assert tokenizer.token_to_id(masks.EOS) == make_shape.EOS
    text = 'A {"b": [1, "öß"]}'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
