"""Experiments from strict YAML: unknown, duplicate, missing or contradictory entries are refused with their line.

The records of ``model.requests`` are the schema: a field added there is a key here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml

from pytest_engram.errors import UsageError
from pytest_engram.experiment_rules import faults
from pytest_engram.model import Experiment

Where = tuple[str | int, ...]

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


_MAKE: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "true",
    "null": lambda _text: None,
}


def load(path: Path) -> Experiment:
    """The experiment in one YAML file; raises ``UsageError`` (``bad-experiment``) naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(str(error), code="bad-experiment", where=str(path), expected="a readable YAML file") from None
    return load_text(text, str(path))


def load_text(text: str, source: str) -> Experiment:
    """Like :func:`load`, from text; ``source`` names it in messages."""
    reader = _Reader(source)
    found: Experiment = reader.record(reader.compose(text), Experiment, ())
    fault = next(faults(found), None)
    if fault is not None:
        reader.refuse(fault.where, fault.seen, fault.expected)
    return replace(found, source=source)


def load_all(paths: Path | Iterable[Path]) -> dict[str, Experiment]:
    """Every experiment of the given files and folders by id, in the order of the file names."""
    given = [paths] if isinstance(paths, Path) else list(paths)
    loaded: dict[str, Experiment] = {}
    for path in [file for one in given for file in (sorted(one.glob("*.y*ml")) if one.is_dir() else [one])]:
        found = load(path)
        if found.id in loaded:
            raise UsageError(
                f"id {found.id!r} is taken by {loaded[found.id].source}", code="bad-experiment", where=str(path),
                expected="an id of its own",
            )  # fmt: skip
        loaded[found.id] = found
    if not loaded:
        where = ", ".join(map(str, given))
        raise UsageError("no experiment", code="bad-experiment", where=where, expected="one YAML file per experiment")
    return loaded


class _Reader:
    """Builds records from composed nodes; remembers the line of every entry by its path of keys."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: dict[Where, int] = {(): 1}

    def refuse(self, where: Where, seen: str, expected: str) -> NoReturn:
        """Raise the one error of this module, at the line of ``where`` or of its nearest ancestor."""
        known = next(where[:depth] for depth in range(len(where), -1, -1) if where[:depth] in self._lines)
        key = ".".join(map(str, where))
        raise UsageError(
            f"{key}: {seen}" if key else seen, code="bad-experiment",
            where=f"{self._source}:{self._lines[known]}", expected=expected,
        )  # fmt: skip

    def compose(self, text: str) -> yaml.Node:
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            self._lines[()] = mark.line + 1 if mark else 1
            self.refuse((), f"not YAML: {error.problem}", "one YAML mapping")
        except yaml.YAMLError as error:
            self.refuse((), f"not YAML: {error}", "one YAML mapping")
        if node is None:
            self.refuse((), "an empty file", "one experiment")
        return node

    def record(self, node: yaml.Node, kind: Any, where: Where) -> Any:
        """A frozen dataclass; its fields (but ``source``) are the allowed keys, those without default are required."""
        allowed = {field.name: field for field in fields(kind) if field.name != "source"}
        entries = self._entries(node, where)
        for key in entries:
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, 1)
                hint = f"{close[0]!r}? Allowed" if close else "one of"
                self.refuse((*where, key), "unknown key", f"{hint}: {', '.join(allowed)}")
        required = [name for name, f in allowed.items() if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in entries]
        if missing:
            self.refuse(where, f"{', '.join(missing)} missing", f"all of: {', '.join(required)}")
        hints = get_type_hints(kind)
        return kind(**{key: self._value(child, hints[key], (*where, key)) for key, child in entries.items()})

    def _entries(self, node: yaml.Node, where: Where) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.refuse(where, _shown(node), "a mapping of keys to values")
        entries: dict[str, yaml.Node] = {}
        for key_node, child in node.value:
            key = self._scalar(key_node, str, where)
            at = (*where, key)
            first = self._lines.get(at)
            self._lines[at] = key_node.start_mark.line + 1
            if key in entries:
                self.refuse(at, "key given twice", f"one entry; the first is in line {first}")
            entries[key] = child
        return entries

    def _value(self, node: yaml.Node, hint: Any, where: Where) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if is_dataclass(hint):
            return self.record(node, hint, where)
        if origin is tuple:
            return self._sequence(node, inner, where)
        if origin is dict:
            return {
                key: self._value(child, inner[1], (*where, key)) for key, child in self._entries(node, where).items()
            }
        if type(None) in inner:
            return None if node.tag.endswith(":null") else self._value(node, inner[0], where)
        if isinstance(hint, type) and issubclass(hint, Enum):
            words = [member.value for member in hint]
            text = self._scalar(node, str, where)
            return hint(text) if text in words else self.refuse(where, repr(text), f"one of: {', '.join(words)}")
        return self._scalar(node, hint, where)

    def _sequence(self, node: yaml.Node, inner: tuple[Any, ...], where: Where) -> tuple[Any, ...]:
        if not isinstance(node, yaml.SequenceNode):
            self.refuse(where, _shown(node), "a list")
        kinds = [inner[0]] * len(node.value) if inner[-1] is ... else list(inner)
        if len(kinds) != len(node.value):
            self.refuse(where, f"{len(node.value)} entries", f"{len(kinds)}")
        found = []
        for index, (child, kind) in enumerate(zip(node.value, kinds, strict=True)):
            at = (*where, index)
            self._lines[at] = child.start_mark.line + 1
            found.append(self._value(child, kind, at))
        return tuple(found)

    def _scalar(self, node: yaml.Node, kind: Any, where: Where) -> Any:
        """Text, number, truth or (for ``Any``) null; YAML 1.1's ``on``, ``012``, ``1:30`` and ``1e3`` are refused."""
        expected = _WORDS.get(kind, "text, a number, true, false or null")
        tag = node.tag.rpartition(":")[2]
        text = str(node.value)
        if not isinstance(node, yaml.ScalarNode):
            self.refuse(where, _shown(node), expected)
        if tag == "bool" and text not in ("true", "false"):
            self.refuse(where, f"{text}, which YAML 1.1 reads as a truth value", f"{expected}; quote it if it is text")
        if tag == "int" and not _DECIMAL.fullmatch(text):
            self.refuse(where, f"{text}, which YAML 1.1 does not read as decimal", f"{expected} in plain decimal")
        names = {str: ("str",), int: ("int",), float: ("float", "int"), bool: ("bool",)}
        if tag not in names.get(kind, ("str", "int", "float", "bool", "null")):
            self.refuse(where, _shown(node), expected)
        try:
            return float(text) if kind is float else _MAKE[tag](text)
        except ValueError:
            self.refuse(where, text, f"{expected}, finite and in plain decimal")


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"{node.tag.rpartition(':')[2]} {node.value!r}"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
