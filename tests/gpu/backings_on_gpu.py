"""Every backing on a real GPU: ``python tests/gpu/backings_on_gpu.py --out DIR``, from the checkout, on its own.

First two ranks on one GPU build, load and audit one table per backing, look up random rows bit by bit and compare the
contents over all backings; every way to open cuMem memory of another process is tried (``cumem_sharing``).  Then
bring-up, alternating: how engines do it today (one thread writes one byte per page) against this package's way
(``populate_sweep.py`` has its threads and chunks).  JSON lines go to DIR/backings_on_gpu.jsonl, a short table comes
last.  Exit 1 if a check failed.  What cannot be had here is NOT_MEASURED with its reason.  ``--reserve-hugetlb``
(root) reserves 2 MiB pages for the largest table, whose own time is told apart, and gives them back.  ``--cpu`` is the
dry run without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from peers_on_gpu import Cpu, Gpu, fill, verify

from pytest_engram import codec
from pytest_engram.engines import backings, engine_class
from pytest_engram.engines.tables import table_bytes, table_views
from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa import populate
from pytest_engram.numa.backing import BACKINGS, Memfd
from pytest_engram.numa.pages import audit_range
from pytest_engram.numa.table import build_table
from pytest_engram.numa.topology import read_topology
from pytest_engram.numa.world import RankSpec, run_world

SHARED = ("tmpfs", "memfd", "hugetlb", "anon-thp", "pinned", "cumem")
STOCK = "tmpfs, touched"
GIB = 1 << 30


def node() -> int:
    """The node that everything is bound to."""
    return read_topology().memory_nodes[0].id


# ------------------------------------------------------------------------------------------------ one table, two ranks


def peer(group: Any, payload: Any) -> dict[str, Any]:
    """One rank: build, load, audit, look up, digest."""
    layout = EngramLayout.for_rows(payload["rows"], layers=(1,))
    asked = TablePlan(ranks=tuple(range(group.size)), mode="bind", nodes=(node(),))
    plan = PlacementPlan(policy="bind", backing=payload["backing"], tables=(asked,))
    kind: type[Gpu] = Cpu if payload["cpu"] else Gpu
    kind.warm()
    backings.install(plan.backing, 0)
    pin = engine_class("cpu" if payload["cpu"] else "cuda").registrar(0)  # its only visible GPU

    def register(table: Any) -> Any:
        if table.backing.resident:
            show(table.address)
        return pin(table)

    table = build_table(group, plan, table_bytes(layout), register=register if pin else None)
    try:
        table.load(partial(fill, layout, group), group)
        begin = time.monotonic()
        audit = table.audit(Moment.LOADED)
        spent, device = time.monotonic() - begin, kind(layout, table_views(table.buffer, layout), group.rank)
        return {
            "wrong": verify(device, layout, group.rank), "crc": zlib.crc32(table.buffer), "audit_s": spent,
            "audit": codec.to_builtins(audit), "receipts": [codec.to_builtins(one) for one in table.receipts],
        }  # fmt: skip
    finally:
        device = None  # type: ignore[assignment]  # drops the views
        table.close()


def show(address: int) -> None:
    """What the kernel says of a driver's mapping, before the audit judges it."""
    for name in ("maps", "numa_maps"):
        for line in Path(f"/proc/self/{name}").read_text().splitlines():
            if line.startswith(f"{address:x}"):
                print(name, line, file=sys.stderr)


def shared(backing: str, rows: int, *, cpu: bool) -> dict[str, Any]:
    """One backing's world as a record."""
    spec = RankSpec(env={"CUDA_VISIBLE_DEVICES": "" if cpu else "0"})
    payload = {"rows": rows, "backing": backing, "cpu": cpu}
    begin = time.monotonic()
    try:
        ranks = run_world(f"{Path(__file__).resolve()}:peer", payload, [spec, spec], deadline_s=60)
    except EngramError as error:
        absent = isinstance(error.__cause__, NotMeasurable) or error.code in ("too-large", "hugetlb-pool")
        return {"backing": backing, "ok": absent, "not_measured": absent, "code": error.code, "error": str(error)}
    as_asked = all(set(rank["audit"]["pages"]) == {str(node())} and not rank["audit"]["unplaced"] for rank in ranks)
    right = as_asked and not any(rank["wrong"] for rank in ranks)
    return {"backing": backing, "ok": right, "seconds": time.monotonic() - begin, "as_asked": as_asked, "ranks": ranks}


@contextmanager
def reserved_pages(pool: Path, nbytes: int) -> Iterator[str]:
    """More 2 MiB pages in the node's pool, as far as the kernel finds room; afterwards as many as before."""
    before = pool.read_text()
    try:
        begin = time.perf_counter()
        pool.write_text(str(int(before) + -(-nbytes // (2 << 20))))
        seconds = time.perf_counter() - begin
        yield f"2 MiB page pool: {before.strip()} before, {pool.read_text().strip()} for this run, in {seconds:.2f} s"
    finally:
        pool.write_text(before)


def open_imported(write: Callable[..., None], *, cpu: bool) -> list[str]:
    """The driver's answers to each variant in two processes on one GPU, as lines for a person."""
    if cpu:
        write(cumem_sharing=None, not_measured="no GPU")
        return []
    entry, payload = f"{Path(__file__).with_name('cumem_sharing.py')}:sharing", {"node": node(), "bytes": 64 << 20}
    try:
        ranks = run_world(entry, payload, [RankSpec(env={"CUDA_VISIBLE_DEVICES": "0"})] * 2, deadline_s=60)
    except EngramError as error:
        write(cumem_sharing=None, error=str(error))
        return [f"cumem sharing: {error}"]
    write(cumem_sharing=ranks)
    tried = [(f"{who}, {name}", codes) for who, rank in zip(("maker", "peer"), ranks, strict=True)
             for name, codes in rank["tried"].items()]  # fmt: skip
    return [f"cumem device {ranks[0]['attributes']}", *(f"cumem {name}: {codes}" for name, codes in tried)]


# ------------------------------------------------------------------------------------------------------------ bring-up


@contextmanager
def huge_tmpfs(nbytes: int) -> Iterator[str | None]:
    """A file on a tmpfs mounted ``huge=always`` in another process's private mount namespace; None where refused."""
    inside = "import os, sys; f = os.open('/mnt', os.O_TMPFILE | os.O_RDWR); print(f, flush=True); sys.stdin.read()"
    mount = f"mount -t tmpfs -o huge=always,size={nbytes + (64 << 20)} tmpfs /mnt"
    command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, inside]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        line = holder.stdout.readline().strip()
        try:
            yield f"/proc/{holder.pid}/fd/{line}" if line else None
        finally:
            holder.stdin.close()


def opened(path: str) -> type[Memfd]:
    """A backing over that file."""

    class HugeTmpfs(Memfd):
        def _open(self) -> int:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)

        def close(self) -> None:
            if self._descriptor >= 0:
                os.ftruncate(self._descriptor, 0)  # its holder lives on
            super().close()

    return HugeTmpfs


def touched(backing: Any) -> str:
    """As engines do today."""
    np.frombuffer(backing.mapped, dtype=np.uint8)[::4096] = 0
    return "one thread, one byte per page"


def populated(backing: Any) -> str:
    """As this package does."""
    return populate.populate(backing, lambda *_: None, write=True)


def made(_backing: Any) -> str:
    """As the driver did already."""
    return "by the driver"


def bring_up(kind: Any, act: Callable[[Any], str], nbytes: int, *, cpu: bool) -> dict[str, Any]:
    """Seconds of making a fresh object resident and of registering it, and what came of it."""
    if not cpu:
        import torch

        torch._C._host_emptyCache()  # the last round's pinned block
    backing = kind(nbytes)
    backing.ask(TablePlan(ranks=(0,), mode="bind", nodes=(node(),)))
    begin = time.perf_counter()
    backing.create()
    backing.map()
    how = act(backing)
    resident, registration = time.perf_counter(), None
    buffer = np.frombuffer(backing.mapped, dtype=np.uint8)  # the registration's owner: with it goes what was registered
    try:
        if not cpu:
            from pytest_engram.gpu.registration import register

            cudart = getattr(backing, "cudart", None)
            registration = register(buffer, cudart=cudart)
        end = time.perf_counter()
        audit = audit_range(
            backing.address, backing.nbytes, rank=0, moment=Moment.REGISTERED, table=0, identity=backing.identity,
            page_bytes=backing.page_bytes,
        )  # fmt: skip
    finally:
        if registration is not None:
            registration.close()
        del buffer
        backing.close()
    return {
        "make_s": resident - begin, "register_s": end - resident, "audit_s": time.perf_counter() - end, "how": how,
        "pages": audit.pages, "huge_bytes": audit.huge_bytes, "detail": backing.detail,
    }  # fmt: skip


def ways(huge: str | None, *, cpu: bool, reserved: bool) -> dict[str, tuple[Any, Callable[[Any], str]]]:
    """Name -> (backing's class, how it becomes resident)."""
    found: dict[str, tuple[Any, Callable[[Any], str]]] = {
        STOCK: (BACKINGS["tmpfs"], touched), "tmpfs, populated": (BACKINGS["tmpfs"], populated),
        "anon-thp, touched": (BACKINGS["anon-thp"], touched), "anon-thp, populated": (BACKINGS["anon-thp"], populated),
    }  # fmt: skip
    if huge:
        found["huge tmpfs, populated"] = (opened(huge), populated)
    if reserved:
        found["hugetlb, populated"] = (BACKINGS["hugetlb"], populated)
    if not cpu:
        found |= {name: (BACKINGS[name], made) for name in backings.CUDA_BACKINGS if name in BACKINGS}
    return found


def alternate(
    nbytes: int, rounds: int, write: Callable[..., None], *, cpu: bool, reserved: bool
) -> dict[str, list[float]]:
    """Every way once per round, each round from another start; GiB/s until resident, by way."""
    rates: dict[str, list[float]] = {}
    with huge_tmpfs(nbytes) as huge:
        if huge is None:
            write(bring_up="huge tmpfs, populated", not_measured="no private mount: unshare or mount was refused")
        todo = list(ways(huge, cpu=cpu, reserved=reserved).items())
        for turn in range(rounds):
            for name, (kind, act) in todo[turn % len(todo) :] + todo[: turn % len(todo)]:
                try:
                    found = bring_up(kind, act, nbytes, cpu=cpu)
                except (EngramError, MemoryError, RuntimeError) as error:
                    write(bring_up=name, round=turn, error=f"{type(error).__name__}: {error}")
                    continue
                rates.setdefault(name, []).append(nbytes / GIB / found["make_s"])
                write(bring_up=name, round=turn, gib=nbytes / GIB, gib_s=rates[name][-1], **found)
    return rates


def main() -> int:
    """All parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=8.0, help="size of one bring-up")
    parser.add_argument("--shared-gib", type=float, default=0.25, help="size of the two ranks' table")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--reserve-hugetlb", action="store_true", help="pages for one table, given back at the end")
    parser.add_argument("--cpu", action="store_true", help="dry run: no GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin, short = time.monotonic(), []
    with (options.out / "backings_on_gpu.jsonl").open("w", encoding="utf-8") as lines, ExitStack() as stack:

        def write(**record: Any) -> None:
            lines.write(json.dumps(record, default=str) + "\n")
            lines.flush()

        rows, nbytes = int(options.shared_gib * GIB) // 264, int(options.gib * GIB)
        pages = nullcontext("no pages are reserved")
        if options.reserve_hugetlb:
            file = Path(f"/sys/devices/system/node/node{node()}/hugepages/hugepages-2048kB/nr_hugepages")
            pages = reserved_pages(file, max(nbytes, table_bytes(EngramLayout.for_rows(rows, layers=(1,)))))
        short.append(stack.enter_context(pages))
        with ThreadPoolExecutor(3) as pool:  # imports of torch take most of the time
            worlds = list(pool.map(partial(shared, rows=rows, cpu=options.cpu), SHARED))
        digests = {rank["crc"] for world in worlds for rank in world.get("ranks", ())}
        for world in worlds:
            write(**world)
            short.append(sentence(world))
        short.append(f"same contents in every rank of every backing: {len(digests) == 1}")
        short += open_imported(write, cpu=options.cpu)
        if not options.cpu:
            for name in backings.CUDA_BACKINGS:
                backings.install(name, 0)
        rates = alternate(nbytes, options.rounds, write, cpu=options.cpu, reserved=options.reserve_hugetlb)
        for name, seen in rates.items():
            ratio = statistics.median(seen) / statistics.median(rates.get(STOCK, seen))
            short.append(f"{name:24} {statistics.median(seen):6.2f} GiB/s  {ratio:5.1f} x stock  of {len(seen)} rounds")
        write(total_s=time.monotonic() - begin, same_contents=len(digests) == 1)
    print("\n".join(short))
    print(f"{time.monotonic() - begin:.0f} s")
    return 0 if len(digests) == 1 and all(world["ok"] for world in worlds) else 1


def sentence(world: dict[str, Any]) -> str:
    """One backing for a person."""
    if "error" in world:
        return f"{world['backing']:9} {'NOT_MEASURED' if world['ok'] else 'FAILED'} {world['code']}: {world['error']}"
    steps = {one["step"]: round(one["seconds"], 3) for one in world["ranks"][0]["receipts"]}
    (detail,) = [one["detail"] for one in world["ranks"][0]["receipts"] if one["step"] == "map"]
    wrong, shown = [rank["wrong"] for rank in world["ranks"]], world["ranks"][1]["audit"]["pages"]
    return f"{world['backing']:9} as asked {world['as_asked']}, wrong {wrong}, peer's pages {shown}, {steps} {detail}"


if __name__ == "__main__":
    if shutil.which("unshare") is None:
        raise SystemExit("unshare (util-linux) is missing")
    raise SystemExit(main())
