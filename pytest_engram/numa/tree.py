"""Small text files under a root, so that a recorded machine reads like the live one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.numa import procfs

Parsed = TypeVar("Parsed")


class Tree:
    """Reads /proc and /sys below ``root``; paths are given without the leading slash."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.live = root == Path("/")  # this very machine, not a recorded tree

    def need(self, name: str) -> str:
        """The stripped content of a file that nothing can be said without."""
        try:
            return (self.root / name).read_bytes().decode(errors="replace").strip("\0\n\t ")
        except OSError as error:
            raise NotMeasurable(
                f"cannot read it: {error.strerror}", code="topology-unreadable", who="topology", where=f"/{name}",
                expected="Linux with /proc and /sys mounted", way_out="mount them, or run outside the sandbox",
            ) from None  # fmt: skip

    def text(self, name: str) -> str | None:
        """The stripped content, or None where the file is absent or unreadable."""
        try:
            return self.need(name)
        except NotMeasurable:
            return None

    def number(self, name: str) -> int | None:
        """A decimal number, or None where there is none."""
        text = self.text(name)
        return int(text) if text and re.fullmatch(r"-?\d+", text) else None

    def need_numbers(self, name: str) -> tuple[int, ...]:
        """A list such as ``0-3,8`` that nothing can be said without."""
        return parse_list(self.need(name), where=f"/{name}")

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list such as ``0-3,8``, or None where the file is absent."""
        return None if self.text(name) is None else self.need_numbers(name)

    def names(self, folder: str, pattern: str = ".+") -> list[str]:
        """Entries of a folder that match ``pattern`` whole, shorter names first, so that numbers are in order."""
        entries = (entry.name for entry in (self.root / folder).glob("*"))
        return sorted(filter(re.compile(pattern).fullmatch, entries), key=lambda name: (len(name), name))


def parsed(parse: Callable[[str], Parsed], text: str, *, where: str, expected: str) -> Parsed:
    """``parse(text)``; text that the kernel never writes is an ``EngramError`` that quotes it and names its file."""
    try:
        return parse(text)
    except (EngramError, LookupError, ValueError):
        seen = repr(text[:80])
        raise EngramError(seen, code="bad-kernel-text", who="topology", where=where, expected=expected) from None


def parse_list(text: str, *, where: str) -> tuple[int, ...]:
    """``0-3,8`` → (0, 1, 2, 3, 8), the kernel's list format; the empty text is the empty list."""
    return parsed(procfs.parse_list, text, where=where, expected="a list such as 0-3,8")


def format_list(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 3, 8) → ``0-3,8``."""
    indexed = enumerate(sorted(numbers))
    runs = [[number for _, number in run] for _, run in itertools.groupby(indexed, lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
