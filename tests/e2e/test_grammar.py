"""Structured output from a running server: the text fits, whatever the model would have said."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from greenlane.text.v1 import text_pb2

from tests.e2e.conftest import MakeServer
from tests.e2e.harness import GUARD_S, Server, text_stub

pytestmark = pytest.mark.e2e

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "moods": {"type": "array", "items": {"enum": ["gay", "grave"]}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "moods", "married"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Who is she?"}], "max_tokens": 300}
ENDLESS = "start: X\nX: " + " & ".join(f"/.*w{i}.*/" for i in range(30))


def texts(server: Server, **fields: Any) -> list[str]:
    body = server.complete(prompt="Emma", **({"max_tokens": 200} | fields)).raise_for_status().json()
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    return [choice["text"] for choice in body["choices"]]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "moods", "married"]
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 150
    assert 1 <= len(person["moods"]) <= 3
    assert set(person["moods"]) <= {"gay", "grave"}
    assert isinstance(person["married"], bool)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_json_schema(server: Server, temperature: float) -> None:
    """Red if an answer isn't the schema's, whole or streamed, through the OpenAI SDK."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none") as client:
        ask: dict[str, Any] = ASK | {"response_format": wanted, "temperature": temperature, "seed": 5}
        whole = client.chat.completions.create(**ask, n=3)
        for choice in whole.choices:
            assert choice.finish_reason == "stop"
            check_person(choice.message.content or "")
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_other_kinds(server: Server) -> None:
    """Red if a kind of constraint is ignored: none of these is what the model would say."""
    for text in texts(server, guided_regex=r"[A-Z]{3}-\d{4}", n=4):
        assert re.fullmatch(r"[A-Z]{3}-\d{4}", text)
    assert set(texts(server, structured_outputs={"choice": ["zebra", "quagga"]}, n=8)) <= {"zebra", "quagga"}
    assert re.fullmatch(
        r"\d+(\+\d+){1,3}", texts(server, guided_grammar='start: /[0-9]{1,3}/ ("+" /[0-9]{1,3}/){1,3}')[0]
    )
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "the", "schema": {"type": "integer", "maximum": 9, "minimum": 1}, "end": "!"}],
        "triggers": ["the"],
    }
    body = server.complete(prompt="Emma", max_tokens=60, response_format=tag, seed=1).raise_for_status().json()
    assert re.search(r"the\s?[1-9]!", body["choices"][0]["text"])
    assert not re.search(r"the\s?[^1-9\s]", body["choices"][0]["text"])


def test_text_grpc(server: Server) -> None:
    """Red if the text service leaves the grammar out, or an error of it doesn't name it."""
    with text_stub(server.grpc) as stub:
        request = text_pb2.GenerateRequest(prompt="Emma", grammar=text_pb2.Grammar(regex="[0-9]{5}"))
        request.sampling.max_tokens = 20
        text = "".join(delta.text for answer in stub.Generate(request, timeout=GUARD_S) for delta in answer.deltas)
    assert re.fullmatch("[0-9]{5}", text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_grammar": ENDLESS}, "guided_grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}}, "response_format"),
        ({"guided_regex": "a" * 140_000}, "guided_regex"),
        ({"guided_regex": "a+", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_bad_grammars(server: Server, fields: dict[str, Any], named: str, stream: bool) -> None:
    """Red if a grammar that can't be served isn't answered with 400 and its name in bounded time, streamed or not."""
    started = time.monotonic()
    answer = server.complete(prompt="Emma", max_tokens=20, stream=stream, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named
    assert time.monotonic() - started < 15


def test_constrained_rows_leave_others_alone(make_server: MakeServer) -> None:
    """Red if a row beside constrained ones gets other tokens, or the depth changes what a constrained row draws."""
    ask: dict[str, Any] = {"prompt": "Emma", "max_tokens": 60, "temperature": 1, "seed": 11, "ignore_eos": True}
    schema = {"prompt": "Jane", "max_tokens": 200, "seed": 3, "temperature": 1, "guided_json": PERSON}
    seen: list[tuple[str, str]] = []
    for depth in (1, 2, 3):
        server = make_server(f"--async-depth={depth}")
        alone = server.complete(**ask).raise_for_status().json()["choices"][0]["text"]
        beside: list[str] = []

        def both(server: Server = server, beside: list[str] = beside) -> None:
            beside.append(server.complete(**schema).raise_for_status().json()["choices"][0]["text"])

        threads = [threading.Thread(target=both) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in [threading.Thread(target=server.complete, kwargs={"prompt": "x", "guided_grammar": ENDLESS})]:
            thread.start()
            threads.append(thread)
        assert server.complete(**ask).raise_for_status().json()["choices"][0]["text"] == alone
        for thread in threads:
            thread.join()
        assert len(set(beside)) == 1
        check_person(beside[0])
        seen.append((alone, beside[0]))
        assert server.stop() == 0
    assert len(set(seen)) == 1


def test_a_slow_grammar_is_left_behind(make_server: MakeServer, tmp_path: Path) -> None:
    """Red when a step waits for a mask: at depth 1 every step would hold both rows until one of them ends."""
    log = tmp_path / "steps.jsonl"
    server = make_server("--async-depth=1", f"--step-log={log}")
    ask: dict[str, Any] = {"prompt": "Emma", "max_tokens": 300, "ignore_eos": True}
    alone = server.complete(**ask).raise_for_status().json()["choices"][0]["text"]
    beside: list[httpx.Response] = []
    ambiguous = 'start: s\ns: "a" | "b" | s s | s s s | s s s s | s s s s s'
    slow = {"prompt": "Jane", "max_tokens": 48, "guided_grammar": ambiguous, "logit_bias": {"2": -100}}
    thread = threading.Thread(target=lambda: beside.append(server.complete(**slow)))
    thread.start()
    while server.stats().gauges.running == 0 and thread.is_alive():
        time.sleep(0.001)
    assert server.complete(**ask).raise_for_status().json()["choices"][0]["text"] == alone
    thread.join()
    body = beside[0].raise_for_status().json()
    assert re.fullmatch("[ab]+", body["choices"][0]["text"])
    assert body["usage"]["completion_tokens"] == 48
    assert server.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [line["decode_rows"] for line in lines if line["event"] == "decode" and not line["chunk_tokens"]]
    both = [at for at, count in enumerate(rows) if count == 2]
    assert 1 in rows[both[0] : both[-1]]
