"""The audit's judgement on machines with two nodes, whose kernel's answers are recorded."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from pytest_engram.audit import render
from pytest_engram.audit.judging import Report, engines, look
from pytest_engram.audit.reading import Limits
from pytest_engram.model import Topology
from pytest_engram.numa import _syscalls, pages

MAPS = Limits(numa_maps=True)
ON_0: Callable[[int, int], int] = lambda pid, address: 0  # noqa: E731


def quarter(pid: int, address: int) -> int:
    """One page in four on node 0."""
    return int(address // 4096 % 4 != 0)


def codes(report: Report) -> list[str]:
    return [one.code for one in report.findings]


def audit(recorded: Any, topology: Topology, placed: Any, pids: tuple[int, ...] = (101,), **options: Any) -> Report:
    return look(recorded.source(placed), pids, options.pop("limits", Limits()), topology, **options)


def test_remote_pages_are_found(recorded: Any, two_nodes: Topology) -> None:
    """Pages away from the node of the worker's own GPU are counted and named, with the next command."""
    recorded.worker(101, gpu=0)
    report = audit(recorded, two_nodes, quarter)
    assert report.tables[0].views[0].remote == 0.75
    assert (codes(report), report.next_command.split()[:2]) == (["remote-pages"], ["pytest-engram", "plan"])
    assert "75.0% of /dev/shm/vllm_engram_a (deleted) lies away from node 0" in render(report)


def test_local_pages_are_no_finding(recorded: Any, two_nodes: Topology) -> None:
    """The same histogram seen from the other GPU's worker is a quarter remote; all local pages yield nothing."""
    recorded.worker(101, gpu=1)
    assert audit(recorded, two_nodes, quarter).tables[0].views[0].remote == 0.25
    assert codes(audit(recorded, two_nodes, lambda pid, address: 1)) == []


def test_four_paragraphs_end_the_report(recorded: Any, two_nodes: Topology) -> None:
    """Finding, evidence, what this does not prove and the next command, in this order, even without a finding."""
    recorded.worker(101)
    lines = render(audit(recorded, two_nodes, ON_0)).splitlines()
    titles = ["Finding", "Evidence", "What this does not prove", "Next command"]
    assert [line for line in lines if line in titles] == titles
    assert "/dev/shm tmpfs size=64m huge=default mpol=bind:1" in "\n".join(lines)


def test_unknown_gpu_node_stays_unknown(recorded: Any, two_nodes: Topology) -> None:
    """K7: without a known GPU node no page is called remote, and none local."""
    recorded.worker(101, gpu=0)
    silent = replace(two_nodes, gpus=tuple(replace(gpu, numa_node=None) for gpu in two_nodes.gpus))
    report = audit(recorded, silent, quarter)
    assert (report.tables[0].views[0].remote, codes(report)) == (None, [])
    recorded.worker(101, gpu=None)
    assert audit(recorded, two_nodes, quarter).workers[0].node is None


def test_a_worker_with_contexts_on_both_sides_has_no_near_node(recorded: Any, two_nodes: Topology) -> None:
    """Device files mapped equally often say nothing about which GPU is used: remote stays unknown."""
    recorded.worker(101, gpu=0)
    maps = recorded.root / "proc/101/maps"
    maps.write_text(maps.read_text() + "7fff00009000-7fff0000a000 rw-s 00000000 00:06 9 /dev/nvidia1\n")
    report = audit(recorded, two_nodes, quarter)
    assert report.workers[0].gpus == {"0000:3b:00.0": 0, "0000:af:00.0": 1}
    assert (report.workers[0].node, report.tables[0].views[0].remote) == (None, None)


def test_dropped_membind_is_found(recorded: Any, two_nodes: Topology) -> None:
    """--membind that the task's policy does not show is a finding; one that it shows is none."""
    recorded.worker(101, environ="A=b\0_VLLM_INTERNAL_NUMACTL_ARGS=--cpunodebind=0 --membind=0\0", cpus="0-3")
    assert codes(audit(recorded, two_nodes, ON_0)) == ["membind-dropped"]
    recorded.worker(101, environ="_VLLM_INTERNAL_NUMACTL_ARGS=--membind=0,1\0", policy="bind:0-1")
    assert codes(audit(recorded, two_nodes, ON_0)) == []


def test_a_shown_policy_is_not_believed(recorded: Any, two_nodes: Topology) -> None:
    """K15: ``bind:0`` is displayed, the pages are on node 1, and that is the finding."""
    recorded.worker(101, gpu=1, title="numactl -N 0 -m 0 vllm serve", policy="bind:0", cpus="0-3")
    report = audit(recorded, two_nodes, lambda pid, address: 1)
    assert (report.workers[0].task_policy, codes(report)) == ("bind:0", ["outside-membind"])


def test_numa_bind_that_bound_only_cpus_is_found(recorded: Any, two_nodes: Topology) -> None:
    """--numa-bind on an ancestor's command line without a memory policy in force is a finding."""
    recorded.worker(7, title="vllm serve model --numa-bind --port 1")
    recorded.worker(101, cpus="0-3")
    recorded.write("proc/101/status", (recorded.root / "proc/101/status").read_text().replace("PPid:\t1", "PPid:\t7"))
    assert codes(audit(recorded, two_nodes, ON_0)) == ["membind-dropped"]
    recorded.worker(7, title="vllm serve model --numa-bind-cpus 0-3")
    assert codes(audit(recorded, two_nodes, ON_0)) == []


def test_numa_bind_nodes_against_the_gpu_map(recorded: Any, two_nodes: Topology) -> None:
    """--numa-bind-nodes that contradicts the GPU map is a finding; K14: CUDA_VISIBLE_DEVICES reorders the GPUs."""
    title = "vllm serve --numa-bind-nodes 1 0 --port 1"
    recorded.worker(101, title=title)
    report = audit(recorded, two_nodes, ON_0)
    assert codes(report) == ["bind-contradicts-gpu"] * 2
    assert "GPU 0000:3b:00.0 on 1, it is near 0" in report.findings[0].message
    recorded.worker(101, title=title, environ="CUDA_VISIBLE_DEVICES=1,GPU-a\0")
    assert codes(audit(recorded, two_nodes, ON_0)) == []


def test_dropped_cpunodebind_is_found(recorded: Any, two_nodes: Topology) -> None:
    """A CPU mask wider than the asked node is a finding, one within it is none."""
    recorded.worker(101, title="numactl --cpunodebind=0 vllm", cpus="0-5")
    assert codes(audit(recorded, two_nodes, ON_0)) == ["cpunodebind-dropped"]
    recorded.worker(101, title="numactl --cpunodebind=0 vllm", cpus="0-3")
    assert codes(audit(recorded, two_nodes, ON_0)) == []


def test_a_shared_page_counts_once(recorded: Any, two_nodes: Topology) -> None:
    """K29: two workers that each touched a half see one table of 64 pages; each view keeps its own half."""
    recorded.worker(101)
    recorded.worker(102)
    half = recorded.START + 32 * 4096

    def placed(pid: int, address: int) -> int:
        return int(pid == 102) if (address < half) == (pid == 101) else -errno.ENOENT

    (table,) = audit(recorded, two_nodes, placed, (101, 102)).tables
    assert (table.pages, table.unplaced, table.asked) == ({0: 32, 1: 32}, {}, 64)
    assert [(view.pages, view.unplaced) for view in table.views] == [
        ({0: 32}, {"ENOENT": 32}),
        ({1: 32}, {"ENOENT": 32}),
    ]


def test_device_mappings_have_no_identity(recorded: Any, two_nodes: Topology) -> None:
    """cuMem mappings of two workers share the device's inode and are still two tables, and so is anonymous memory."""
    for pid in (101, 102):
        recorded.worker(pid, path="/dev/nvidiactl", inode=13)
    tables = audit(recorded, two_nodes, ON_0, (101, 102), limits=Limits(min_bytes=4096)).tables
    assert [(table.kind, len(table.views)) for table in tables] == [("cumem", 1)] * 2


def test_unplaced_pages_keep_their_reasons(recorded: Any, two_nodes: Topology) -> None:
    """K24: -errno and entries that the kernel left alone are reasons, never nodes."""
    recorded.worker(101)
    answers = [-errno.ENOENT, -errno.EFAULT, -errno.EBUSY, _syscalls.UNANSWERED]
    report = audit(recorded, two_nodes, lambda pid, address: answers[address // 4096 % 4])
    assert report.tables[0].unplaced == {"ENODATA": 16, "EBUSY": 16, "EFAULT": 16, "ENOENT": 16}
    assert (report.tables[0].pages, report.tables[0].views[0].remote) == ({}, None)
    assert "16 pages ENOENT (not touched through this worker's own mapping" in render(report)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_refused_query_names_the_permission(recorded: Any, two_nodes: Topology, number: int) -> None:
    """K6: a refused query is a named gap of its worker; the peer's pages are still counted."""
    recorded.worker(101)
    recorded.worker(102)
    source = recorded.source(ON_0)

    def status(pid: int, addresses: Any) -> bytes:
        if pid == 101:
            raise OSError(number, "move_pages")
        return bytes(source.status(pid, addresses))

    report = look(replace(source, status=status), (101, 102), Limits(), two_nodes)
    assert [view.pid for view in report.tables[0].views] == [102]
    assert "CAP_SYS_PTRACE" in report.workers[0].problems[-1].message
    assert report.next_command.startswith("sudo ")


def test_hugetlb_units(recorded: Any, two_nodes: Topology) -> None:
    """K28, K30: numa_maps counts 2 MiB pages under an escaped name; PSS, which leaves them out, is absent, not 0."""
    line = f"{recorded.START:x} default file=/anon_hugepage\\040(deleted) huge dirty=2 N1=2 kernelpagesize_kB=2048\n"
    recorded.worker(101, gpu=1, pages=1024, path="/anon_hugepage (deleted)", page_kb=2048, table_line=line,
                    smaps="Private_Hugetlb: 4096 kB\n")  # fmt: skip
    report = audit(recorded, two_nodes, lambda pid, address: 1, limits=Limits(min_bytes=4096, numa_maps=True))
    (view,) = report.tables[0].views
    assert (view.page_kb, view.pss_bytes, view.numa_maps_bytes) == (2048, None, {1: 4 << 20})
    assert report.workers[0].numastat == {0: 3 * 4096, 1: 4 << 20}
    assert codes(report) == []


def test_disagreeing_routes_are_found(recorded: Any, two_nodes: Topology) -> None:
    """As many pages on other nodes by numa_maps are a finding, other numbers are a worker at work; it alone decides
    nothing."""
    line = f"{recorded.START:x} bind:0 file=/dev/shm/vllm_engram_a\\040(deleted) N0=63 N1=1 kernelpagesize_kB=4\n"
    recorded.worker(101, table_line=line)
    assert codes(audit(recorded, two_nodes, ON_0, limits=MAPS)) == ["route-disagreement"]
    for other in ("N0=64", "N0=63", "N0=60 N1=5"):
        recorded.worker(101, table_line=line.replace("N0=63 N1=1", other))
        assert codes(audit(recorded, two_nodes, ON_0, limits=MAPS)) == []


def test_secrets_of_the_environment_are_not_kept(recorded: Any, two_nodes: Topology) -> None:
    """Of a worker's environment only three named variables reach the report."""
    recorded.worker(101, environ="HF_TOKEN=hush\0CUDA_VISIBLE_DEVICES=1\0")
    text = str(asdict(audit(recorded, two_nodes, ON_0)))
    assert "hush" not in text
    assert "'visible': '1'" in text


def test_unreadable_text_is_a_gap_not_a_crash(recorded: Any, two_nodes: Topology) -> None:
    """A smaps line that no kernel writes is quoted as a gap, and the pages are still counted."""
    recorded.worker(101, smaps="Nonsense here\n")
    report = audit(recorded, two_nodes, ON_0)
    assert (report.tables[0].pages, report.tables[0].views[0].huge_share) == ({0: 64}, None)
    assert any("Nonsense here" in one.message for one in report.workers[0].problems)


def test_samples_do_not_alias_with_interleaving() -> None:
    """A sampled table states its bound and sees both nodes of an interleave; a fixed stride would see one."""
    table = range(0, 40960 * 4096, 4096)
    where, bound = pages.strata(table, 1024, "table"), pages.bound({0: 1024})
    odd = sum(offset // 4096 % 2 for offset in where) / len(where)
    assert (len(where), round(bound, 4)) == (1024, 0.0306)
    assert abs(odd - 0.5) < bound
    assert sum(offset // 4096 % 2 for offset in table[::40]) == 0
    assert pages.strata(table[:1024], 1024, "key") == table[:1024]


METRICS = """
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 3.0
vllm:time_to_first_token_seconds_sum{engine="1",model_name="m"} 0.0
vllm:time_to_first_token_seconds_count{engine="1",model_name="m"} 0.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 2e-1
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 10.0
vllm:time_per_output_token_seconds_sum{engine="1",model_name="m"} NaN
"""


def test_latencies_beside_the_remote_share(recorded: Any, two_nodes: Topology) -> None:
    """Per-engine means join the workers that their titles name; no samples are None, never 0 ms."""
    recorded.worker(101, gpu=0, title="VLLM::Worker_DP0_TP0")
    recorded.worker(102, gpu=1, title="VLLM::Worker_DP1_TP0")
    first, second = audit(recorded, two_nodes, quarter, (101, 102), metrics=METRICS).engines
    assert (first.ttft_ms, first.itl_ms, first.pids, first.remote) == (500, pytest.approx(20), (101,), 0.75)
    assert (second.ttft_ms, second.itl_ms, second.pids, second.remote) == (None, None, (102,), 0.25)


def test_unknown_engine_stays_unknown(recorded: Any, two_nodes: Topology) -> None:
    """A worker whose title names no rank joins the only engine of a server, and no engine where there are two."""
    recorded.worker(101, title="python serve.py")
    report = audit(recorded, two_nodes, quarter, metrics=METRICS)
    assert [(one.pids, one.remote) for one in report.engines] == [((), None)] * 2
    alone = METRICS.replace('engine="1"', 'engine="0"')
    assert [one.pids for one in engines(alone, report.workers, report.tables)] == [(101,)]
