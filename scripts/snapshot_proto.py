"""The wire contracts as plain data, and what makes a new one incompatible with an old one.

Run it to add new messages and fields to tests/fixtures/wire_contract.json. It refuses to record a removal, a
renumbering or a change of type, since running clients and servers would then misread each other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from greenlane.engine.v1 import engine_pb2
from greenlane.text.v1 import text_pb2

SNAPSHOT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "wire_contract.json"
CONTRACTS = (engine_pb2.DESCRIPTOR, text_pb2.DESCRIPTOR)

Contract = dict[str, str]
"""What stands on the wire, e.g. `greenlane.text.v1.Chat.messages` → `1 repeated greenlane.text.v1.Message`."""


def describe(files: tuple[FileDescriptor, ...] = CONTRACTS) -> Contract:
    """Every field, enum value and method by full name."""
    contract: Contract = {}
    for file in files:
        for message in file.message_types_by_name.values():
            _describe_message(message, contract)
        for enum in file.enum_types_by_name.values():
            contract |= {f"{enum.full_name}.{value.name}": str(value.number) for value in enum.values}
        for service in file.services_by_name.values():
            contract |= {method.full_name: _method(method) for method in service.methods}
    return contract


def incompatibilities(old: Contract, new: Contract) -> list[str]:
    """What was removed or changed; a removed field counts, because its number may not be used again."""
    gone = [f"{name} ({what}) was removed" for name, what in old.items() if name not in new]
    changed = [
        f"{name} was `{what}` and is `{new[name]}`" for name, what in old.items() if name in new and new[name] != what
    ]
    return gone + changed


def _describe_message(message: Descriptor, contract: Contract) -> None:
    for field in message.fields:
        contract[field.full_name] = _field(field)
    for nested in message.nested_types:
        _describe_message(nested, contract)


def _field(field: FieldDescriptor) -> str:
    kinds = {number: name.removeprefix("TYPE_").lower() for name, number in _field_types()}
    kind = field.message_type.full_name if field.message_type else kinds[field.type]
    kind = field.enum_type.full_name if field.enum_type else kind
    presence = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    group = f" in {oneof}" if oneof and not oneof.startswith("_") else ""
    return f"{field.number} {presence}{kind}{group}"


def _field_types() -> list[tuple[str, int]]:
    return [(name, getattr(FieldDescriptor, name)) for name in dir(FieldDescriptor) if name.startswith("TYPE_")]


def _method(method: Any) -> str:
    sides = ((method.client_streaming, method.input_type), (method.server_streaming, method.output_type))
    texts = [f"{'stream ' if streams else ''}{message.full_name}" for streams, message in sides]
    return f"{texts[0]} -> {texts[1]}"


def main() -> int:
    new = describe()
    broken = incompatibilities(json.loads(SNAPSHOT.read_text()), new) if SNAPSHOT.exists() else []
    if broken:
        print("\n".join(["refused, the wire contract would break:", *broken]), file=sys.stderr)
        return 1
    SNAPSHOT.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
