"""The wire contracts: generated code matches the .proto files, and nothing on the wire changes its meaning."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from scripts.snapshot_proto import SNAPSHOT, Contract, describe, incompatibilities

ROOT = Path(__file__).resolve().parents[2]


def _sources(folder: Path) -> list[Path]:
    """Bytecode that lies beside them doesn't count."""
    return [path for path in folder.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")]


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    """Red when a .proto file was edited without scripts/gen_proto.sh, or generated code was edited by hand."""
    assert importlib.metadata.version("grpcio-tools") == "1.84.0"
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "gen_proto.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
    )
    generated = sorted(path.relative_to(tmp_path) for path in _sources(tmp_path))
    assert generated == sorted(path.relative_to(ROOT / "proto") for path in _sources(ROOT / "proto"))
    stale = [str(path) for path in generated if (tmp_path / path).read_bytes() != (ROOT / "proto" / path).read_bytes()]
    assert stale == [], "run scripts/gen_proto.sh"


def test_wire_contract_is_compatible() -> None:
    """Red when a field, enum value or method was removed, renumbered or retyped."""
    assert incompatibilities(json.loads(SNAPSHOT.read_text()), describe()) == []


def test_wire_contract_is_recorded() -> None:
    """Red when something new is on the wire without being in the snapshot: its later removal would go unseen."""
    assert sorted(describe().keys() - json.loads(SNAPSHOT.read_text()).keys()) == [], "run scripts/snapshot_proto.py"


BASE = """
    message_type { name: "M"
      field { name: "a" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }
      field { name: "b" number: 2 type: TYPE_STRING label: LABEL_REPEATED } }
    enum_type { name: "E" value { name: "ZERO" number: 0 } }
    service { name: "S" method { name: "Do" input_type: ".t.M" output_type: ".t.M" server_streaming: true } }
"""


def contract(text: str) -> Contract:
    """The contract of a file given in protobuf's text format."""
    from google.protobuf import text_format

    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    text_format.Parse(text, file)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return describe((pool.FindFileByName("t.proto"),))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('field { name: "a" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }', ""),
        ("number: 1 type: TYPE_INT32", "number: 3 type: TYPE_INT32"),
        ("type: TYPE_INT32", "type: TYPE_SINT32"),
        ('name: "b"', 'name: "c"'),
        ("LABEL_REPEATED", "LABEL_OPTIONAL"),
        ('"ZERO" number: 0', '"NOTHING" number: 0'),
        ("server_streaming: true", "server_streaming: false"),
    ],
)
def test_breaking_changes_are_seen(before: str, after: str) -> None:
    """Red when a kind of incompatible change is no longer noticed."""
    assert before in BASE
    assert incompatibilities(contract(BASE), contract(BASE.replace(before, after)))


def test_additions_are_compatible() -> None:
    more = BASE.replace('field { name: "b"', 'field { name: "d" number: 9 type: TYPE_BOOL } field { name: "b"')
    assert more != BASE
    assert incompatibilities(contract(BASE), contract(more)) == []
