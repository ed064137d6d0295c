"""Stand-in servers to audit, and recorded two-node machines."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.audit.reading import Source
from pytest_engram.model import Gpu, NumaNode, Topology

PAGE = 4096
SERVER = """
import mmap, os, sys
name, size, maps = sys.argv[1], int(sys.argv[2]), []
if name.startswith("/"):
    shm = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(shm, size)
    maps.append(mmap.mmap(shm, size))
if "--twice" in sys.argv:
    maps.append(mmap.mmap(shm, size))
if "--private" in sys.argv:
    maps.append(mmap.mmap(shm, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
if "--far" in sys.argv:
    os.ftruncate(shm, 1 << 46)
    maps.append(mmap.mmap(shm, size, offset=(1 << 46) - size))
if "--all" in sys.argv:
    memfd = os.memfd_create("kv")
    os.ftruncate(memfd, size)
    maps.append(mmap.mmap(memfd, size))
    maps.append(mmap.mmap(-1, size))
    huge = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge.madvise(mmap.MADV_HUGEPAGE)
    maps.append(huge)
print("ready", flush=True)
for line in sys.stdin:
    which, first, last = map(int, line.split())
    for page in range(first, last):
        maps[which][page * 4096] = 1
    print("touched", flush=True)
"""


class Server:
    """A process that maps what a server maps and touches what it is told to."""

    def __init__(self, name: str, size: int, *words: str, **options: Any) -> None:
        command = [sys.executable, "-I", "-S", "-c", SERVER, name, str(size), *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **options
        )
        self.pid = self.process.pid
        assert self._answer() == "ready"

    def touch(self, first: int, last: int, *, which: int = 0) -> None:
        """Write one byte of each page [first, last) of a mapping."""
        assert self.process.stdin
        self.process.stdin.write(f"{which} {first} {last}\n")
        assert self._answer() == "touched"

    def _answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        """End it; its mappings go with it."""
        self.process.communicate(timeout=60)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """``serve(name, size, *words)``: a stand-in server; name "-" maps nothing named."""
    started: list[Server] = []

    def start(*arguments: Any, **options: Any) -> Server:
        started.append(Server(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def shm_name(engines_names: None) -> Iterator[str]:
    """A name in /dev/shm as vLLM chooses them; nothing of it stays."""
    name = f"/dev/shm/vllm_engram_audit-test-{os.getpid()}"
    yield name
    Path(name).unlink(missing_ok=True)


def node(number: int) -> NumaNode:
    """CPUs 0-3 on node 0, 4-7 on node 1."""
    return NumaNode(
        id=number, cpus=tuple(range(4 * number, 4 * number + 4)), memory_bytes=1 << 34, free_bytes=1 << 33,
        reclaimable_bytes=0, distances={number: 10, 1 - number: 21},
    )  # fmt: skip


@pytest.fixture
def two_nodes() -> Topology:
    """Two nodes, a GPU near each."""
    gpus = (Gpu(pci="0000:3b:00.0", numa_node=0, uuid="GPU-a"), Gpu(pci="0000:af:00.0", numa_node=1, uuid="GPU-b"))
    return Topology(nodes=(node(0), node(1)), sockets={0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, gpus=gpus)


Placed = Callable[[int, int], int]


class Recorded:
    """A machine of text files whose ``move_pages`` answers are a function of (pid, address)."""

    START = 0x7F0000000000

    def __init__(self, root: Path) -> None:
        self.root = root
        for minor, pci in enumerate(("0000:3b:00.0", "0000:af:00.0")):
            self.write(f"proc/driver/nvidia/gpus/{pci}/information", f"Model: \t\t X\nDevice Minor: \t {minor}\n")

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def worker(
        self, pid: int, *, gpu: int | None = 0, policy: str = "default", title: str = "VLLM::Worker_DP0",
        pages: int = 64, cpus: str = "0-7", environ: str = "", path: str = "/dev/shm/vllm_engram_a (deleted)",
        inode: int = 77, page_kb: int = 4, table_line: str = "", smaps: str = "",
    ) -> None:  # fmt: skip
        start, end, mode = self.START, self.START + pages * PAGE, "rw-s" if inode else "rw-p"
        heap = "55d000000000-55d000021000 rw-p 00000000 00:00 0 [heap]\n"
        header = f"{start:x}-{end:x} {mode} 00000000 00:1a {inode} {path}\n"
        files = [] if gpu is None else [0, 0, 1, 1, gpu]  # CUDA maps every GPU's file, and its own once more
        device = "".join(f"{0x7FFF00000000 + n * PAGE:x}-{0x7FFF00001000 + n * PAGE:x} rw-s 00000000 00:06 9 "
                         f"/dev/nvidia{minor}\n" for n, minor in enumerate(files))  # fmt: skip
        fields = f"Rss: {pages * 4} kB\nPss: {pages * 2} kB\nKernelPageSize: {page_kb} kB\n{smaps}"
        self.write(f"proc/{pid}/status", f"Name:\tx\nPPid:\t1\nVmRSS:\t{pages * 4} kB\n"
                   f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1\n")  # fmt: skip
        self.write(f"proc/{pid}/cmdline", title.replace(" ", "\0") + "\0")
        self.write(f"proc/{pid}/environ", environ)
        self.write(f"proc/{pid}/maps", heap + header + device)
        self.write(f"proc/{pid}/smaps", heap + header + fields + device)
        self.write(f"proc/{pid}/mountinfo", "25 24 0:23 / /dev/shm rw - tmpfs shm rw,size=64m,mpol=bind:1\n")
        self.write(
            f"proc/{pid}/numa_maps", f"55d000000000 {policy} heap anon=3 N0=3 kernelpagesize_kB=4\n" + table_line
        )

    def source(self, placed: Placed) -> Source:
        def status(pid: int, addresses: Sequence[int]) -> bytes:
            return struct.pack(f"{len(addresses)}i", *(placed(pid, address) for address in addresses))

        return Source(self.root, status)


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """An empty recorded machine with two GPUs."""
    return Recorded(tmp_path)
