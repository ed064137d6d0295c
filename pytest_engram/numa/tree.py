"""Small text files under a root, so that a recorded machine reads like the live one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pytest_engram.errors import EngramError, NotMeasurable


class Tree:
    """Reads /proc and /sys below ``root``; paths are given without the leading slash."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, name: str) -> str | None:
        """The stripped content, or None where the file is absent or unreadable."""
        try:
            return (self.root / name).read_text(encoding="utf-8", errors="replace").strip("\0\n\t ")
        except OSError:
            return None

    def need(self, name: str) -> str:
        """The content of a file that nothing can be said without."""
        try:
            return (self.root / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise NotMeasurable(
                f"cannot read it: {error.strerror}", code="topology-unreadable", who="topology", where=f"/{name}",
                expected="Linux with /proc and /sys mounted", way_out="mount them, or run outside the sandbox",
            ) from None  # fmt: skip

    def number(self, name: str) -> int | None:
        """A decimal number, or None where there is none."""
        text = self.text(name)
        return int(text) if text and re.fullmatch(r"-?\d+", text) else None

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list such as ``0-3,8``, or None where the file is absent."""
        text = self.text(name)
        return None if text is None else parse_list(text, where=f"/{name}")

    def names(self, folder: str, pattern: str = ".+") -> list[str]:
        """Entries of a folder that match ``pattern`` whole, numbers in numeric order."""
        try:
            found = [entry for entry in os.listdir(self.root / folder) if re.fullmatch(pattern, entry)]
        except OSError:
            return []
        return sorted(found, key=_natural)

    def link(self, name: str) -> str | None:
        """What a symbolic link says, unresolved (``ipc:[4026531839]``), or None where it cannot be read."""
        try:
            return os.readlink(self.root / name)
        except OSError:
            return None

    @property
    def live(self) -> bool:
        """This very machine, not a recorded tree."""
        return self.root == Path("/")

    def real(self, name: str) -> str:
        """Where a symbolic link leads, as an absolute path."""
        return os.path.realpath(self.root / name)


def parse_list(text: str, *, where: str) -> tuple[int, ...]:
    """``0-3,8`` → (0, 1, 2, 3, 8), the kernel's list format; the empty text is the empty list."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise EngramError(
                f"{text!r}", code="bad-kernel-text", who="topology", where=where, expected="a list such as 0-3,8"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def format_list(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 3, 8) → ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.findall(r"\d+|\D+", name)]
