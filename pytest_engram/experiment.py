"""Experiments from strict YAML: unknown, duplicate, missing or contradictory entries are refused with their line.

The records of ``model.requests`` are the schema: a field added there is a key here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import msgspec
import yaml

from pytest_engram.errors import UsageError
from pytest_engram.experiment_rules import Where, faults, in_order
from pytest_engram.model import Claim, Experiment

_FLOAT = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
_MAKE: dict[str, Callable[[str], Any]] = {
    "str": str, "int": int, "float": float, "bool": "true".__eq__, "null": lambda _text: None,
}  # fmt: skip
_WORDS = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "a mapping",
}  # fmt: skip


def load(path: Path) -> Experiment:
    """The experiment in one YAML file; raises ``UsageError`` (``bad-experiment``) naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(str(error), code="bad-experiment", where=str(path), expected="a readable YAML file") from None
    return load_text(text, str(path))


def load_text(text: str, source: str) -> Experiment:
    """Like :func:`load`, from text; ``source`` names it in messages."""
    given = _Source(text, source)
    given.overlay()
    for where, allowed in _unknown(given.tree, Experiment, ()):
        close = difflib.get_close_matches(str(where[-1]), allowed, 1)
        hint = f"{close[0]!r}? Allowed" if close else "one of"
        given.refuse(where, "unknown key", f"{hint}: {', '.join(allowed)}")
    try:
        found = msgspec.convert(given.tree, Experiment)
    except msgspec.ValidationError as error:
        given.refuse_type(str(error))
    fault = next(faults(found), None)
    if fault is not None:
        given.refuse(*fault)
    return replace(found, source=source)


def load_all(paths: Path | Iterable[Path]) -> dict[str, Experiment]:
    """Every experiment of the given files and folders by id, in the order of the file names."""
    given = [paths] if isinstance(paths, Path) else list(paths)
    loaded: dict[str, Experiment] = {}
    for path in [file for one in given for file in (sorted(one.glob("*.y*ml")) if one.is_dir() else [one])]:
        found = load(path)
        if found.id in loaded:
            seen = f"id {found.id!r} is taken by {loaded[found.id].source}"
            raise UsageError(seen, code="bad-experiment", where=str(path), expected="an id of its own")
        loaded[found.id] = found
    if not loaded:
        where = ", ".join(map(str, given))
        raise UsageError("no experiment", code="bad-experiment", where=where, expected="one YAML file per experiment")
    in_order(loaded.values())
    return loaded


def models() -> dict[str, Path]:
    """The presets that ``workload.model`` may name: shapes of real models and of machines that cannot hold one."""
    folder = Path(str(resources.files("pytest_engram.fixtures") / "models"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _unknown(tree: Any, hint: Any, where: Where) -> Iterator[tuple[Where, list[str]]]:
    """The path of every key that its record does not have, with those that it has."""
    inner = (*get_args(hint), hint)[0]
    if isinstance(tree, list):
        for index, child in enumerate(tree):
            yield from _unknown(child, inner, (*where, index))
    elif isinstance(tree, dict) and is_dataclass(inner):
        hints = {name: kind for name, kind in get_type_hints(inner).items() if name != "source"}
        for key, child in tree.items():
            if key in hints:
                yield from _unknown(child, hints[key], (*where, key))
            else:
                yield (*where, key), list(hints)


class _Source:
    """A YAML text as plain values (``tree``) that remembers the line of every entry by its path of keys."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines: dict[Where, int] = {(): 1}
        self._seen: set[yaml.Node] = set()
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            self._lines[()] = mark.line + 1 if mark else 1
            self.refuse((), f"not YAML: {getattr(error, 'problem', error)}", "one YAML mapping")
        if not isinstance(node, yaml.MappingNode):
            self.refuse((), "an empty file" if node is None else "no mapping", "one experiment: keys and values")
        self.tree = self._value(node, ())

    def overlay(self) -> None:
        """Let the named model's entries stand where the workload gives none."""
        work = self.tree.get("workload")
        name = work.get("model") if isinstance(work, dict) else None
        if isinstance(name, str) and name:
            if name not in (known := models()):
                self.refuse(("workload", "model"), repr(name), f"one of: {', '.join(known)}")
            self.tree["workload"] = _Source(known[name].read_text(encoding="utf-8"), str(known[name])).tree | work

    def refuse(self, where: Where, seen: str, expected: str) -> NoReturn:
        """Raise the one error of this module, at the line of ``where`` or of its nearest ancestor."""
        line = next(self._lines[where[:n]] for n in range(len(where), -1, -1) if where[:n] in self._lines)
        key = ".".join(map(str, where))
        seen = f"{key}: {seen}" if key else seen
        raise UsageError(seen, code="bad-experiment", where=f"{self._name}:{line}", expected=expected)

    def refuse_type(self, message: str) -> NoReturn:
        """Say msgspec's ``message`` in a reader's words."""
        text, _, path = message.partition(" - at ")
        where = tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", path))
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing:
            self.refuse(where, f"{missing[1]} missing", "every key that has no default")
        wanted = re.sub(r"`array` of length (\d+)", r"\1 entries", text.removeprefix("Expected ").partition(", got")[0])
        wanted = re.sub(r"`(\w+)[^`]*`", lambda found: _WORDS.get(found[1], found[1]), wanted)
        if text.startswith("Invalid enum"):
            wanted = f"one of: {', '.join(claim.value for claim in Claim)}"
        self.refuse(where, repr(reduce(lambda tree, key: tree[key], where, self.tree)), wanted)

    def _value(self, node: yaml.Node, where: Where) -> Any:
        if node in self._seen:  # it could hold itself, or a billion others
            self.refuse(where, "an alias", "every entry written out")
        self._seen.add(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            self._lines |= {(*where, index): child.start_mark.line + 1 for index, child in enumerate(node.value)}
            return [self._value(child, (*where, index)) for index, child in enumerate(node.value)]
        return self._scalar(node, where)

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key_node, child in node.value:
            key = self._value(key_node, where)
            if not isinstance(key, str):
                self.refuse(where, f"the key {key!r}", "keys that are text")
            at, first = (*where, key), self._lines.get((*where, key))
            self._lines[at] = key_node.start_mark.line + 1
            if key in entries:
                self.refuse(at, "key given twice", f"one entry; the first is in line {first}")
            entries[key] = self._value(child, at)
        return entries

    def _scalar(self, node: yaml.Node, where: Where) -> Any:
        """Text, number, truth or null; YAML 1.1's ``on``, ``012``, ``1:30`` and ``.nan`` are refused."""
        tag, text = node.tag.rpartition(":")[2], str(node.value)
        if tag == "bool" and text not in ("true", "false"):
            self.refuse(where, f"{text}, which YAML 1.1 reads as a truth value", "true or false, or text in quotes")
        if tag == "int" and not re.fullmatch(r"[-+]?(0|[1-9](_?[0-9]){0,17})", text):
            self.refuse(where, f"{text}, which YAML 1.1 does not read as decimal", "a whole number in plain decimal")
        if tag not in _MAKE or (tag == "float" and not re.fullmatch(_FLOAT, text)):
            self.refuse(where, text, "text, true, false, null or a number, finite and in plain decimal")
        return _MAKE[tag](text)
