"""Reads a decoded JSON object field by field: the right type or a refusal that names the field.

Owns the caps on what a body may hold before anything is built from it, and the texts of type errors. An absent field
and `null` are the same. Ranges of sampling values belong to the engine core; here a number must only fit its wire type.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import msgspec

from frontend.request import ApiError, Code

MAX_JSON_ITEMS = 1 << 21
"""Lists, objects and their items in one body, so that a small body can't become a large heap."""
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

Json = dict[str, object]


def invalid(message: str, parameter: str | None = None) -> ApiError:
    return ApiError(Code.INVALID_ARGUMENT, message, parameter)


def decode_object(text: bytes, field: str | None = None) -> Json:
    """The JSON object in `text`, a body or one of its fields; raises ApiError for anything else, saying what and where
    but never quoting it."""
    what = field or "the body"
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_JSON_ITEMS:
        raise invalid(f"{what} holds more than {MAX_JSON_ITEMS} JSON items", field)
    try:
        with _collector_paused():
            value = msgspec.json.decode(text)
    except RecursionError:
        raise invalid(f"{what} is nested too deeply", field) from None
    except msgspec.MsgspecError as error:  # its texts name positions, not content
        raise invalid(f"{what} is not valid JSON: {error}", field) from None
    except UnicodeDecodeError:
        raise invalid(f"{what} is not valid UTF-8", field) from None
    if not isinstance(value, dict):
        raise invalid(f"{what} must be a JSON object, not {kind(value)}", field)
    return value


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Without garbage collection: it would visit a million new lists many times, and JSON has no cycles to find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def kind(value: object) -> str:
    """What a value is, in JSON's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


class Fields:
    """One object of a body. Every reader returns None for an absent field; `where` is the object's own path."""

    def __init__(self, values: Json, where: str = "") -> None:
        self._values = values
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def raw(self, name: str) -> object:
        return self._values.get(name)

    def wrong(self, name: str, expected: str) -> ApiError:
        path = self.path(name)
        return invalid(f"{path} must be {expected}, not {kind(self.raw(name))}", path)

    def boolean(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(name, "a boolean")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.boolean(name)
        return default if value is None else value

    def text(self, name: str, max_bytes: int | None = None) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        if max_bytes is not None and len(value.encode()) > max_bytes:
            path = self.path(name)
            raise invalid(f"{path} has {len(value.encode())} bytes; at most {max_bytes} are allowed", path)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer within [low, high]; booleans, strings and 1.0 are not integers."""
        value = self.raw(name)
        if value is None:
            return None
        return self.checked_integer(name, value, low, high)

    def checked_integer(self, name: str, value: object, low: int, high: int) -> int:
        path = self.path(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(f"{path} must be an integer, not {kind(value)}", path)
        if not low <= value <= high:
            shown = value if abs(value) < 1 << 80 else "out of range"  # a number of 10,000 digits is no good message
            raise invalid(f"{path} is {shown}; it must be from {low} to {high}", path)
        return value

    def number(self, name: str) -> float | None:
        """A finite number, as float64."""
        value = self.raw(name)
        return None if value is None else self.checked_number(name, value)

    def checked_number(self, name: str, value: object) -> float:
        path = self.path(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(f"{path} must be a number, not {kind(value)}", path)
        try:
            return float(value)
        except OverflowError:
            raise invalid(f"{path} is out of range", path) from None

    def items(self, name: str, cap: int) -> list[object] | None:
        """A list of at most `cap` items, whatever they are."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        if len(value) > cap:
            raise invalid(f"{self.path(name)} has {len(value)} entries; at most {cap} are allowed", self.path(name))
        return value

    def integers(self, name: str, cap: int, low: int = 0, high: int = INT32_MAX) -> tuple[int, ...]:
        values = self.items(name, cap) or []
        return tuple(self.checked_integer(f"{name}[{i}]", value, low, high) for i, value in enumerate(values))

    def object(self, name: str) -> Json | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value
