"""The Jinja environment of chat templates, set up as transformers sets it up: templates are written against that.

Owns the sandbox and the names that templates find. Bounds neither time nor memory: `template_child.py` runs what is
rendered here in a process of its own, which may be killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


def check_source(source: str) -> None:
    """Raise jinja2.TemplateError for a template that could never be rendered. Nothing of it is run or computed.

    Compiling does that: it folds constants, whatever they cost.
    """
    environment = build_environment(datetime.now)
    tree = environment.parse(source)
    for kind, known in ((jinja2.nodes.Filter, environment.filters), (jinja2.nodes.Test, environment.tests)):
        for node in tree.find_all(kind):
            if node.name not in known:
                raise jinja2.TemplateAssertionError(f"no {kind.__name__.lower()} named {node.name!r}", node.lineno)


class _Dict:
    """`dict(…)` in templates, without the type object itself."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)` in templates, without names that mean something to Python."""

    def __init__(*args: Any, **items: Any) -> None:
        self, *pairs = args  # so that `self` may be an item
        attributes = dict(*pairs, **items)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} can't be set on a namespace: it begins with an underscore")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def build_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The environment; `now` is what `strftime_now` tells."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escaping, with the options that templates use."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
