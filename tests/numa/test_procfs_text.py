"""Parsers of recorded /proc text in which every number differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_engram.errors import EngramError
from pytest_engram.numa import procfs
from pytest_engram.numa.tree import Tree

RECORDED = Path(__file__).resolve().parents[2] / "fixtures" / "procfs"


def recorded(name: str) -> str:
    """The text of one fixture."""
    return (RECORDED / name).read_text()


def test_numa_maps_of_two_nodes() -> None:
    """Policies of one and of two words, nodes, huge pages and deleted names are read from a real two-node kernel."""
    lines = [procfs.parse_numa_maps_line(line) for line in recorded("numa_maps-two-nodes.txt").splitlines()]
    seen = [(line.policy, line.pages, line.page_kb) for line in lines]
    for known in (
        ("weighted interleave:0-1", {0: 384, 1: 128}, 4), ("bind:1", {1: 2}, 2048), ("prefer:0", {0: 772}, 4),
        ("default", {0: 771}, 4), ("bind:1", {1: 1024}, 4), ("interleave:0-1", {0: 385, 1: 384}, 4),
    ):  # fmt: skip
        assert known in seen
    assert [line.start for line in lines if line.page_kb == 2048] == [0x7FFFEBC00000]


def test_numa_maps_without_pages_or_with_several_preferred_nodes() -> None:
    """A VMA without resident pages has no page size; ``prefer (many)`` is one policy."""
    empty = procfs.parse_numa_maps_line("7f0000000000 prefer (many):0,2 file=/a\\040b\\011c")
    assert (empty.policy, empty.pages, empty.page_kb) == ("prefer (many):0,2", {}, 0)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "zz default",
        "7f00",
        "7f00 default surprise=1",
        "7f00 default N0=x",
        "7f00 default N=1",
        "7f00 default novel",
    ],
)
def test_unknown_numa_maps_text_is_quoted(line: str) -> None:
    """A line with a word that is not understood is an error that quotes it."""
    with pytest.raises(EngramError) as caught:
        procfs.parse_numa_maps_line(line)
    assert repr(line) in str(caught.value)


def test_smaps_of_two_nodes() -> None:
    """Headers, sizes, flags and identities of a recorded process."""
    vmas = {vma.start: vma for vma in procfs.parse_smaps(recorded("smaps-two-nodes.txt"))}
    hugetlb, tmpfs = vmas[0x7FFFEBC00000], vmas[0x7FFFF1C00000]
    private, stack = vmas[0x7FFFF0A00000], vmas[0x7FFFFFFDE000]
    assert (hugetlb.identity, hugetlb.kb["Private_Hugetlb"], hugetlb.kb["Rss"]) == ("00:11:1341", 4096, 0)
    assert (tmpfs.identity, tmpfs.path, tmpfs.kb["Rss"]) == ("00:1c:2", "/dev/shm/#2 (deleted)", 3072)
    assert (private.identity, private.path, private.kb["AnonHugePages"]) == ("anon", "", 4096)
    assert stack.path == "[stack]"


def test_smaps_fields_are_not_mixed_up() -> None:
    """In a block whose numbers all differ every field keeps its own."""
    (vma,) = procfs.parse_smaps(recorded("smaps-distinct.txt"))
    assert len(set(vma.kb.values())) == len(vma.kb) == 24
    assert (vma.kb["Rss"], vma.kb["Pss"], vma.kb["ShmemPmdMapped"], vma.kb["FilePmdMapped"]) == (
        3084,
        1028,
        6144,
        10240,
    )
    assert (vma.end - vma.start, vma.offset, vma.permissions) == (0x304000, 0x3000, "rw-s")
    assert vma.path == "/dev/shm/a table (deleted)"


@pytest.mark.parametrize("text", ["Rss: 4 kB\n", "1000-2000 rw-p 00000000 00:00 0 \nRss: four kB\n"])
def test_unknown_smaps_text_is_quoted(text: str) -> None:
    """A field before any header, or a value that is no number, is an error that quotes the line."""
    with pytest.raises(EngramError, match="smaps line not understood: 'Rss: "):
        procfs.parse_smaps(text)


def test_status_and_meminfo() -> None:
    """Allowed lists and memory figures of a recorded guest."""
    status = procfs.parse_status(recorded("status.txt"))
    assert (status["Cpus_allowed_list"], status["Mems_allowed_list"]) == ("0-1", "0-1")
    node, machine = (procfs.parse_meminfo(recorded(name)) for name in ("node1-meminfo.txt", "meminfo.txt"))
    assert (node["MemTotal"], node["MemFree"], node["Inactive(file)"], node["HugePages_Free"]) == (
        1479344, 1361440, 7832, 6,
    )  # fmt: skip
    assert machine["MemTotal"] == 2987936
    with pytest.raises(EngramError, match="'MemTotal: lots'"):
        procfs.parse_meminfo("MemTotal: lots\n")
    with pytest.raises(EngramError, match="'no colon'"):
        procfs.parse_status("no colon\n")


def test_the_last_mount_hides_earlier_ones() -> None:
    """The mount of a path is the longest point's last line; flags, sizes and policies are kept."""
    mounts = procfs.parse_mounts(recorded("mountinfo.txt"))
    shm = procfs.mount_of("/dev/shm", mounts)
    assert shm is not None
    assert (shm.kind, shm.options) == ("tmpfs", "rw,nosuid,nodev,noexec,relatime")
    assert [shm.option(name) for name in ("size", "huge", "mpol", "gid")] == [
        "65537k", "within_size", "interleave:0,2-3", "default",
    ]  # fmt: skip
    spaced, root = procfs.mount_of("/mnt/with space/x", mounts), procfs.mount_of("/mnt/with", mounts)
    assert (spaced and spaced.kind, root and root.kind) == ("ext4", "overlay")
    with pytest.raises(EngramError, match="'too few words'"):
        procfs.parse_mounts("too few words\n")
    unnamed = procfs.mount_of("/mnt/unnamed", mounts)
    assert unnamed is not None
    assert unnamed.kind == "9p"
    assert procfs.mount_of("/x", ()) is None


@settings(derandomize=True, deadline=None)
@given(st.frozensets(st.integers(0, 300)))
def test_lists_round_trip(numbers: frozenset[int]) -> None:
    """Any set of CPUs written in the kernel's list format is read back."""
    ordered, runs = sorted(numbers), []
    for number in ordered:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    assert procfs.parse_list(text + "\n") == tuple(ordered)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "0-3-5", "1;2"])
def test_bad_lists_are_quoted(text: str) -> None:
    """Text that is no list is quoted."""
    with pytest.raises(EngramError, match="CPU or node list not understood"):
        procfs.parse_list(text)


ODD = ("\r", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\xa0", "\ufffd")


@pytest.mark.parametrize("odd", ODD)
def test_names_may_hold_what_python_calls_a_line_end(odd: str) -> None:
    """K30: the kernel escapes spaces and newlines at most; every other character is part of a name."""
    maps = f"7f0000000000-7f0000001000 rw-s 0 00:1a 7 /dev/shm/a{odd}b\n7f0000001000-7f0000002000 rw-p 0 00:00 0 \n"
    assert [vma.path for vma in procfs.parse_smaps(maps)] == [f"/dev/shm/a{odd}b", ""]
    line = procfs.parse_numa_maps_line(f"7f0000000000 bind:0 file=/dev/shm/a{odd}b dirty=1 N0=1 kernelpagesize_kB=4\n")
    assert (line.policy, line.pages) == ("bind:0", {0: 1})
    assert procfs.parse_status(f"Name:\ta{odd}b\nMems_allowed_list:\t0\n")["Mems_allowed_list"] == "0"
    text = f"1 2 0:3 / /mnt/a{odd}b rw - tmpfs x{odd} rw\n4 2 0:5 / /dev/shm rw - tmpfs  rw,mpol=bind:1\n"
    mounts = procfs.parse_mounts(text)
    assert [mount.point for mount in mounts] == [f"/mnt/a{odd}b", "/dev/shm"]


def test_files_of_any_bytes_are_read(tmp_path: Path) -> None:
    """Names of bytes that are no UTF-8, and carriage returns, reach the reader as one line."""
    (tmp_path / "mountinfo").write_bytes(b"1 2 0:3 / /mnt/\xff\rx rw - tmpfs y rw\n")
    (mount,) = procfs.parse_mounts(Tree(tmp_path).need("mountinfo"))
    assert mount.point == "/mnt/\ufffd\rx"
