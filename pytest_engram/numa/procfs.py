"""Text of /proc and /sys to records.  Pure: no file is opened here; a line that is not understood is quoted.

Formats: proc(5), numa_maps(5), Documentation/filesystems/proc.rst, cpuset(7) "List format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_engram.errors import EngramError

_SMAPS_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+) *(.*)")
_SMAPS_FIELD = re.compile(r"(\w+):\s+(\d+)(?: kB)?")
_SPACED_POLICY = re.compile(r"(?<= )(weighted|prefer) (interleave|\(many\))")  # the kernel's names of two words
_WORD = re.compile(
    r"(?:N(\d+)|(kernelpagesize_kB)|anon|dirty|mapped|mapmax|swapcache|active|writeback)=(\d+)|file=.*|heap|stack|huge"
)


def unescape(text: str) -> str:
    r"""Undo the octal escapes (``\040`` is a space) of seq_file names."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def parse_list(text: str) -> tuple[int, ...]:
    """A CPU or node list, e.g. ``0-3,8,10-11``; empty text is the empty list."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        if not re.fullmatch(r"\d+(-\d+)?", part):
            raise _unknown("CPU or node list", text)
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaMapsLine:
    """One VMA of numa_maps; ``pages`` counts pages of ``page_kb`` KiB per node, ``policy`` is the kernel's own word."""

    start: int
    policy: str
    pages: dict[int, int]
    page_kb: int = 0  # 4 for transparent huge pages too, only hugetlb shows more; 0 without any resident page


def parse_numa_maps_line(line: str) -> NumaMapsLine:
    """One line of ``/proc/PID/numa_maps``."""
    start, *words = _SPACED_POLICY.sub(r"\1_\2", line, count=1).strip("\n").split(" ")
    if not words or not re.fullmatch(r"[0-9a-f]+", start):
        raise _unknown("numa_maps line", line)
    found = [_WORD.fullmatch(word) for word in words[1:]]
    if None in found:
        raise _unknown(f"numa_maps word {words[1 + found.index(None)]!r}", line)
    pages = {int(word[1]): int(word[3]) for word in found if word and word[1]}
    page_kb = next((int(word[3]) for word in found if word and word[2]), 0)
    return NumaMapsLine(start=int(start, 16), policy=words[0].replace("_", " "), pages=pages, page_kb=page_kb)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vma:
    """One VMA of smaps.  ``kb`` holds every ``Name: N kB`` line as printed (KiB)."""

    start: int
    end: int
    permissions: str
    offset: int
    device: str  # major:minor, hexadecimal
    inode: int
    path: str
    kb: dict[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """ "dev:inode" of the mapped object, or "anon"."""
        return f"{self.device}:{self.inode}" if self.inode else "anon"


def parse_smaps(text: str) -> tuple[Vma, ...]:
    """All VMAs of ``/proc/PID/smaps`` (also of ``maps``, which has headers only)."""
    vmas: list[Vma] = []
    for line in filter(None, text.split("\n")):
        if header := _SMAPS_HEADER.fullmatch(line):
            start, end, permissions, offset, device, inode, path = header.groups()
            vmas.append(Vma(start=int(start, 16), end=int(end, 16), permissions=permissions, offset=int(offset, 16),
                            device=device, inode=int(inode), path=unescape(path)))  # fmt: skip
        elif vmas and (found := _SMAPS_FIELD.fullmatch(line)):
            vmas[-1].kb[found[1]] = int(found[2])
        elif not vmas or not line.startswith("VmFlags:"):
            raise _unknown("smaps line", line)
    return tuple(vmas)


def parse_status(text: str) -> dict[str, str]:
    """``/proc/PID/status`` as printed, e.g. ``Cpus_allowed_list`` and ``Mems_allowed_list``."""
    return {found[1]: found[2] for found in _matches(r"([^:]+):\s*(.*)", text, "status line")}


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` or one node's ``meminfo``: KiB per name (``HugePages_*`` are counts)."""
    form = r"(?:Node \d+ )?([\w()]+):\s+(\d+)(?: kB)?"
    return {found[1]: int(found[2]) for found in _matches(form, text, "meminfo line")}


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.  ``root`` is the part of the filesystem that is mounted."""

    root: str
    point: str
    options: str
    kind: str
    super_options: str

    def option(self, name: str, default: str = "default") -> str:
        """A filesystem's option, e.g. tmpfs' ``size``, ``huge``, ``mpol``; node lists hold commas (``bind:0,2``)."""
        found = re.search(rf"(?:^|,){name}=([^,]+(?:,\d[\d-]*)*)", self.super_options)
        return found[1] if found else default


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """``/proc/PID/mountinfo``, in mount order (a later line hides an earlier one of the same point)."""
    form = "W W W (W) (W) (W)(?: W)* - (W) [^ ]* (W)".replace("W", "[^ ]+")  # only space and newline are escaped
    return tuple(Mount(*map(unescape, found.groups())) for found in _matches(form, text, "mountinfo line"))


def mount_of(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that ``path`` lies on: the longest mount point, the last of equals."""
    around = [mount for mount in mounts if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")]
    return max(reversed(around), key=lambda mount: len(mount.point), default=None)


def _matches(form: str, text: str, what: str) -> Iterator[re.Match[str]]:
    for line in filter(None, map(str.strip, text.split("\n"))):  # splitlines would break names
        if not (found := re.fullmatch(form, line)):
            raise _unknown(what, line)
        yield found


def _unknown(what: str, line: str) -> EngramError:
    seen = f"{what} not understood: {line!r}"
    return EngramError(seen, code="unknown-proc-text", way_out="report this kernel's text")
