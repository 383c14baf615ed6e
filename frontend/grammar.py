"""What a client's words for a constraint on the output mean: one grammar, or a refusal that names the field.

Owns the names that OpenAI (`response_format`) and vLLM (`structured_outputs`, `guided_*`) gave them. Reads no grammar:
what compiles it says what is wrong with it.
"""

from __future__ import annotations

import msgspec

from frontend.openai_fields import Fields, Json, invalid
from frontend.request import Grammar

ANY_OBJECT = '{"type":"object"}'
MAX_CHOICES = 4096
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""vLLM's older names, and what stands under `structured_outputs` now."""
_UNSERVED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def asked_grammar(fields: Fields) -> Grammar | None:
    """What a body asks its output to follow. Raises ApiError naming the field."""
    found = [_response_format(fields), _structured_outputs(fields)]
    found += [_grammar(fields, old, new) for old, new in GUIDED.items()]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        names = " and ".join(grammar.field for grammar in grammars)
        raise invalid(f"{names} exclude each other; an output can follow only one of them", grammars[1].field)
    return grammars[0] if grammars else None


def choice(choices: list[str], field: str) -> Grammar:
    """One of these strings."""
    if not choices or "" in choices or len(choices) > MAX_CHOICES:
        raise invalid(f"{field} must hold 1 to {MAX_CHOICES} strings, none of them empty", field)
    return Grammar("choice", _json(choices), field)


def _response_format(fields: Fields) -> Grammar | None:
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT, "response_format")
        case "json_schema":
            inner = Fields(wanted, "response_format").object("json_schema") or {}
            schema = Fields(inner, "response_format.json_schema").object("schema")
            if schema is None:
                raise invalid("response_format.json_schema.schema is missing", "response_format")
            return Grammar("json_schema", _json(schema), "response_format")
        case "structural_tag" if "structures" in wanted:
            return Grammar("structural_tag", _json(wanted), "response_format")
    raise invalid(
        "response_format.type must be text, json_object, json_schema, or structural_tag with structures and triggers",
        "response_format",
    )


def _structured_outputs(fields: Fields) -> Grammar | None:
    inner = fields.object("structured_outputs")
    if inner is None:
        return None
    reader = Fields(inner, "structured_outputs")
    for name in _UNSERVED:
        if inner.get(name):
            raise invalid(f"structured_outputs.{name} can't be served by this server; leave it out", reader.path(name))
    names = [name for name in (*GUIDED.values(), "structural_tag") if inner.get(name) not in (None, False)]
    if len(names) != 1:
        raise invalid(
            "structured_outputs must hold exactly one of json, regex, choice, grammar, json_object and structural_tag",
            "structured_outputs",
        )
    return _grammar(reader, names[0], names[0])


def _grammar(fields: Fields, name: str, kind: str) -> Grammar | None:
    """The grammar under `name`, if there is one."""
    value, path = fields.raw(name), fields.path(name)
    if value is None:
        return None
    if value in ("", []):
        raise invalid(f"{path} is empty: an output can't follow it; leave it out", path)
    match kind:
        case "json" if isinstance(value, dict):
            return Grammar("json_schema", _json(value), path)
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT, path) if fields.flag(name) else None
        case "choice":
            return choice(_strings(fields, name), path)
    text = fields.text(name)
    assert text is not None
    return Grammar({"json": "json_schema", "grammar": "lark"}.get(kind, kind), text, path)


def _strings(fields: Fields, name: str) -> list[str]:
    strings: list[str] = []
    for item in fields.items(name, MAX_CHOICES) or []:
        if not isinstance(item, str):
            raise fields.wrong(name, "a list of strings")
        strings.append(item)
    return strings


def _json(value: Json | list[str]) -> str:
    return msgspec.json.encode(value).decode()
