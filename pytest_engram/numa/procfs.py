"""Text of /proc and /sys to records.  Pure: no file is opened here; a line that is not understood is quoted.

Formats: proc(5), numa_maps(5), Documentation/filesystems/proc.rst, cpuset(7) "List format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_engram.errors import EngramError

_OCTAL = re.compile(r"\\([0-7]{3})")
_SMAPS_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+) *(.*)$")
_SMAPS_FIELD = re.compile(r"^(\w+):\s+(\d+)(?: kB)?$")
_MEMINFO = re.compile(r"^(?:Node (\d+) )?([\w()]+):\s+(\d+)(?: kB)?$")
_SPACED_POLICY = re.compile(r"(?<= )(weighted|prefer) (interleave|\(many\))")  # the kernel's names of two words
_COUNTS = frozenset({"anon", "dirty", "mapped", "mapmax", "swapcache", "active", "writeback"})
_FLAGS = frozenset({"heap", "stack", "huge"})


def unescape(text: str) -> str:
    r"""Undo the octal escapes (``\040`` is a space) of seq_file names."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


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
    page_kb: int | None  # absent when the VMA has no resident page
    file: str | None = None
    flags: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def page_bytes(self) -> int | None:
        """Bytes of one counted page: 4096 for transparent huge pages too, only hugetlb shows more."""
        return self.page_kb * 1024 if self.page_kb is not None else None


def parse_numa_maps_line(line: str) -> NumaMapsLine:
    """One line of ``/proc/PID/numa_maps``."""
    words = _SPACED_POLICY.sub(r"\1_\2", line, count=1).split()
    if len(words) < 2 or not re.fullmatch(r"[0-9a-f]+", words[0]):
        raise _unknown("numa_maps line", line)
    pages: dict[int, int] = {}
    counts: dict[str, int] = {}
    file: str | None = None
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name == "file":
            file = unescape(value)
        elif value.isdigit() and re.fullmatch(r"N\d+", name):
            pages[int(name[1:])] = int(value)
        elif value.isdigit() and (name in _COUNTS or name == "kernelpagesize_kB"):
            counts[name] = int(value)
        elif word not in _FLAGS:
            raise _unknown(f"numa_maps word {word!r}", line)
    page_kb = counts.pop("kernelpagesize_kB", None)
    flags = frozenset(words[2:]) & _FLAGS
    return NumaMapsLine(
        start=int(words[0], 16),
        policy=words[1].replace("_", " "),
        pages=pages,
        page_kb=page_kb,
        file=file,
        flags=flags,
        counts=counts,
    )


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
    kb: dict[str, int]
    vm_flags: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """ "dev:inode" of the mapped object, or "anon"."""
        return f"{self.device}:{self.inode}" if self.inode else "anon"


def parse_smaps(text: str) -> tuple[Vma, ...]:
    """All VMAs of ``/proc/PID/smaps`` (also of ``maps``, which has headers only)."""
    return tuple(_vma(header, lines) for header, lines in _blocks(text))


def _blocks(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    header: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        match = _SMAPS_HEADER.match(line)
        if match is None and header is None:
            raise _unknown("smaps line", line)
        if match is None:
            lines.append(line)
            continue
        if header:
            yield header, lines
        header, lines = match, []
    if header:
        yield header, lines


def _vma(header: re.Match[str], lines: list[str]) -> Vma:
    kb: dict[str, int] = {}
    vm_flags: tuple[str, ...] = ()
    for line in lines:
        if line.startswith("VmFlags:"):
            vm_flags = tuple(line.split()[1:])
        elif match := _SMAPS_FIELD.match(line):
            kb[match[1]] = int(match[2])
        else:
            raise _unknown("smaps line", line)
    start, end, permissions, offset, device, inode, path = header.groups()
    return Vma(
        start=int(start, 16), end=int(end, 16), permissions=permissions, offset=int(offset, 16),
        device=device, inode=int(inode), path=unescape(path), kb=kb, vm_flags=vm_flags,
    )  # fmt: skip


def parse_status(text: str) -> dict[str, str]:
    """``/proc/PID/status`` as printed, e.g. ``Cpus_allowed_list`` and ``Mems_allowed_list``."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            raise _unknown("status line", line)
        fields[name] = value.strip()
    return fields


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` or one node's ``meminfo``: KiB per name (``HugePages_*`` are counts)."""
    fields: dict[str, int] = {}
    for line in text.splitlines():
        match = _MEMINFO.match(line.strip())
        if match is None:
            raise _unknown("meminfo line", line)
        fields[match[2]] = int(match[3])
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of ``/proc/mounts``."""

    device: str
    point: str
    kind: str
    options: dict[str, str]  # a flag such as "rw" has an empty value; tmpfs: "size", "huge", "mpol"


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """``/proc/mounts``, in mount order (a later line hides an earlier one of the same point)."""
    mounts = []
    for line in text.splitlines():
        words = line.split()
        if len(words) != 6:
            raise _unknown("mounts line", line)
        options = {name: value for name, _, value in (option.partition("=") for option in words[3].split(","))}
        mounts.append(Mount(device=words[0], point=unescape(words[1]), kind=words[2], options=options))
    return tuple(mounts)


def mount_of(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that ``path`` lies on: the longest mount point, the last of equals."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _unknown(what: str, line: str) -> EngramError:
    return EngramError(
        f"{what} not understood: {line!r}", code="unknown-proc-text", way_out="report this kernel's text"
    )
