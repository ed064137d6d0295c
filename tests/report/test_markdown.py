"""The report page: complete, bounded, and safe against what stands in its cells."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from pytest_engram.model import PlacementSample, Problem, Span, StartupSample, StepReceipt, SweepSample, WorkerPolicy
from pytest_engram.report import figure, markdown
from pytest_engram.report.account import Account

PROVENANCE = {"command": "pytest -m overlap", "kernel": {"release": "6.18", "numa_balancing": 0}, "gpu": None}


@pytest.fixture
def page(make_verdict, make_evidence):
    """A page of one passed experiment."""
    return markdown.render(Account([make_verdict()], [make_evidence()]), PROVENANCE)


def _rows(page, title):
    """Cells of the table under a heading that starts with ``title``, without its head and ruler."""
    lines = page.split(f"# {title}", 1)[1].split("\n")
    table = [line for line in lines[: next(i for i, x in enumerate(lines[2:], 2) if not x.startswith("|"))] if line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")][2:]


def test_the_head_comes_first_and_is_short(page):
    """Status and command stand in the first lines, before any detail."""
    head = page[: page.index("## B1")]
    assert len(head.encode()) < 1500
    assert "| B1         | improves | suite loop | PASS   |" in head
    assert "pytest -m overlap" in head


def test_every_kind_of_evidence_has_its_table(page):
    """Medians, pages per NUMA node, start-up, ledgers, provenance: each with units and the arm."""
    medians = {row[0]: row[1:] for row in _rows(page, "Medians over runs")}
    assert medians["lookup"] == ["2.0 µs", "2.0 µs", "2.0 µs"]
    assert medians["queueing"] == ["300 ns", "300 ns", "300 ns"]
    assert medians["exposed_wait"] == ["500 ns", "500 ns", "500 ns"]
    assert _rows(page, "Where the pages lay")[0] == [
        "A", "0", "0", "loaded", "3.0 MiB", "1.0 MiB", "0", "4.0 MiB of 4.0 MiB", "move_pages+numa_maps", "2"
    ]  # fmt: skip
    assert _rows(page, "Start-up")[0] == ["A", "0", "pre-touch", "900.0 ms", "1,024", "1,024", "1,024", "2", ""]
    assert [row[2:5] for row in _rows(page, "Bytes per step")[:3]] == [
        ["source", "792.0 KiB", "2.0 µs"], ["source, nothing beside it", "792.0 KiB", "absent"],
        ["staging", "1.5 MiB", "2.0 µs"],
    ]  # fmt: skip
    assert ["kernel.numa_balancing", "0"] in _rows(page, "Provenance")
    assert ["gpu", "null"] in _rows(page, "Provenance")


def test_effects_keep_their_blocks(characterised, make_evidence):
    """An effect is shown with its interval, its p-value and every block, in per cent."""
    page = markdown.render(Account([characterised], [make_evidence("A1")]), {})
    assert _rows(page, "Effects")[0] == ["2", "B", "lookup", "−3.1 %", "[−4.0, −2.2]", "0.0040", "8", "−3.5 −2.8"]
    assert "reported, not judged" in page


def test_what_it_does_not_prove_is_said(page, make_verdict):
    """Each page names the limits of subject, engine and load; a verdict without evidence says that there is none."""
    assert "nothing here speaks of a served engine" in page
    assert "no PCIe link took part" in page
    assert "goodput are not measured" in page
    modules = markdown.render(Account([make_verdict(subject="engine modules")], []), {})
    assert "Subject 'engine modules': nothing here speaks of a served engine." in modules
    assert "There is no evidence behind this verdict." in modules


def test_cells_cannot_break_the_table(make_verdict, make_evidence):
    """Pipes, newlines, tags and links in texts of people stay text."""
    gate = {"observed": "a | b\n| c", "reason": "x", "next_step": "<img src=x> [y](z) `q`"}
    page = markdown.render(Account([make_verdict("FAIL", at=1, gate=gate, title="T | U")], [make_evidence()]), {})
    row = next(line for line in page.split("\n") if line.startswith("| 1   | treatment"))
    assert r"a \| b \| c" in row
    assert r"\<img src=x> [y]\(z) \`q\`" in row
    assert row.replace(r"\|", "").count("|") == 8
    assert r"T \| U" in page


def test_equal_problems_share_a_row(make_verdict, make_evidence, make_run):
    """A problem of many runs is one line with its count, so a broken machine does not fill the page."""
    lost = Problem(code="peer-died", message="rank 1 died", who="rank 1")
    runs = tuple(make_run(n, "B", problems=(lost,)) for n in range(6))
    page = markdown.render(Account([make_verdict()], [make_evidence(runs=runs)]), {})
    assert _rows(page, "Problems") == [["B", "INVALID", "peer-died", "rank 1", "", "rank 1 died", "6"]]


def test_a_tables_size_is_cross_checked(make_verdict, make_evidence, make_run):
    """Per table and moment: what the ranks' PSS adds up to, how the nodes grew and the policy's own words."""
    run = make_run()
    pages = replace(run.placement[0].distributions[0], pss_bytes=2 << 20, shmem_growth={0: 3 << 20, 1: 1 << 20})
    other = replace(pages, rank=1)

    def page(*found):
        samples = tuple(PlacementSample(rank=one.rank, distributions=(one,)) for one in found)
        evidence = make_evidence(runs=(replace(run, placement=samples),))
        return _rows(markdown.render(Account([make_verdict()], [evidence]), {}), "What each table took")

    assert page(pages, other) == [
        ["A", "0", "loaded", "2", "4.0 MiB", "4.0 MiB", "node 0 3.0 MiB, node 1 1.0 MiB", "bind:0", "1"]
    ]
    silent = replace(other, pss_bytes=None, shmem_growth={})
    assert page(silent) == [["A", "0", "loaded", "1", "4.0 MiB", "absent", "absent", "bind:0", "1"]]


def test_workers_and_the_prediction_are_shown(make_verdict, make_evidence, make_run):
    """What was in force for a rank, which is less than what it was allowed, stands in a row of its own."""
    worker = WorkerPolicy(rank=1, cpus_allowed="4-7", mems_allowed="0-1", task_policy="bind", task_nodes=(1,),
                          staging="NUMA node 1 100%")  # fmt: skip
    runs = tuple(make_run(n, placement=(PlacementSample(rank=1, distributions=(), worker=worker),)) for n in (0, 2))
    page = markdown.render(
        Account([make_verdict()], [make_evidence(runs=runs, direction_note="the | wait shrinks")]), {}
    )
    assert _rows(page, "Workers") == [["A", "1", "4-7", "0-1", "bind 1", "NUMA node 1 100%", "2"]]
    assert "**Predicted**: the \\| wait shrinks." in page
    bare = markdown.render(Account([make_verdict()], [make_evidence()]), {})
    assert "Workers" not in bare
    assert "Predicted" not in bare


@pytest.mark.parametrize("limit", [2_000, 20_000])
def test_the_page_is_bounded(make_verdict, make_evidence, limit):
    """X10: a page never exceeds its limit in bytes, keeps its head, and says that it was cut."""
    many = {f"key {n}": "ü–" * 100 for n in range(2000)}
    page = markdown.render(Account([make_verdict()], [make_evidence()]), {"command": "pytest", **many}, limit=limit)
    assert len(page.encode()) <= limit
    assert page.startswith("# Engram gates")
    assert "**Cut here:**" in page.rstrip().split("\n")[-1]
    assert "Cut here" not in markdown.render(Account([make_verdict()], [make_evidence()]), PROVENANCE)


def test_the_default_bound_is_below_what_ci_drops():
    """X10: the bound leaves room below 1 MiB."""
    assert markdown.LIMIT < 1 << 20


def test_one_long_value_does_not_fill_the_page(make_verdict):
    """A provenance value is shortened with its true length."""
    page = markdown.render(Account([make_verdict()], []), {"dmesg": "x" * 10_000})
    assert "(10000 characters)" in page
    assert len(page) < 5_000


def test_no_verdicts_is_said():
    """An empty run renders a page that claims nothing."""
    page = markdown.render(Account([], []), {})
    assert "No experiment was judged" in page


def test_the_word_appears_only_through_the_verdicts_sentence(make_verdict, make_evidence, page, characterised):
    """The page's own words never speak of a speed-up; the verdict's sentence does."""
    assert "speed" not in (page + markdown.render(Account([characterised], []), {})).lower()
    spoken = markdown.render(
        Account([replace(make_verdict(), sentence="B1: a speed-up of 4.6 %")], [make_evidence()]), {}
    )
    assert spoken.count("speed-up") == 1


def test_two_evidences_of_one_experiment_keep_apart(make_verdict, make_evidence, make_run):
    """The second verdict is shown with the second evidence."""
    slow = make_run(0, "A", startup=(StartupSample(rank=0, receipts=(
        StepReceipt(step="register", rank=0, seconds=16.4, minor_faults=(0, 0), object_pages=None, mapped_pages=None),
    )),))  # fmt: skip
    page = markdown.render(Account([make_verdict()] * 2, [make_evidence(), make_evidence(runs=(slow,))]), {})
    first, second = page.split("## B1")[1:]
    assert "pre-touch" in first
    assert "register" in second
    assert "16 s" in second
    assert "absent" in second


def test_each_kind_of_bytes_has_its_own_time(make_verdict, make_evidence, make_run):
    """Source beside compute and alone, staging, projection and gate: own spans, own rates, padded and repeated rows."""
    run = make_run()
    line = run.overlap[0].timelines[0]
    spans = tuple(
        Span(name=name, layer=1, start=3000, end=3000 + ns) for name, ns in (("projection", 800), ("gate", 400))
    )
    overlap = replace(run.overlap[0], timelines=(replace(line, spans=spans),), alone_ns=(1000, 1000),
                      staging_bytes=2 << 20, distinct_bytes=405_504)  # fmt: skip
    evidence = make_evidence(runs=(replace(run, overlap=(overlap,)),))
    evidence = replace(evidence, plan=replace(evidence.plan, rows=10_000))
    rows = {
        row[2]: row[3:] for row in _rows(markdown.render(Account([make_verdict()], [evidence]), {}), "Bytes per step")
    }
    assert rows["source"][1:3] == ["2.0 µs", "405.5 GB/s"]
    assert "rows 1,536, tiles 96, grid 66; 50.0% read again" in rows["source"][3]
    assert rows["source, nothing beside it"][1:3] == ["1.0 µs", "811.0 GB/s"]
    assert rows["staging"][3] == "by the lookups; 1,024 rows of padded heads"
    assert (rows["projection"][1], rows["gate"][1]) == ("800 ns", "400 ns")
    assert "gather" not in rows


def test_layers_are_listed_where_arms_differ(make_verdict, make_evidence, make_run):
    """A layer that takes longer in one arm has a row with every arm's median; layers that agree have none."""

    def run(index, arm, ns):
        one = make_run(index, arm)
        spans = (Span(name="compute", layer=0, start=0, end=ns), Span(name="compute", layer=1, start=ns, end=ns + 500))
        line = replace(one.overlap[0].timelines[0], spans=spans)
        return replace(one, overlap=(replace(one.overlap[0], timelines=(line,)),))

    page = markdown.render(Account([make_verdict()], [make_evidence(runs=(run(0, "A", 400), run(1, "B", 900)))]), {})
    assert _rows(page, "Time by layer") == [["0", "400 ns", "900 ns"]]
    alike = markdown.render(Account([make_verdict()], [make_evidence(runs=(run(0, "A", 400), run(1, "B", 410)))]), {})
    assert "Time by layer" not in alike


@pytest.fixture
def swept(make_evidence, make_run):
    """Two runs whose sweep has 64 tokens with one peer and with both, slowed by a quarter in arm B."""

    def run(index, arm, main):
        cells = [
            SweepSample(rank=rank, tokens=64, peers=peers, lookup_ns=(2000,) * 20, exposed_ns=(0,) * 20,
                        main_ns=(main,), quiet_main_ns=(1000,), source_bytes=811_008)
            for rank, peers in ((0, 1), (0, 2), (1, 2))
        ]  # fmt: skip
        return make_run(index, arm, sweep=tuple(cells))

    return make_evidence(runs=(run(0, "A", 1000), run(1, "B", 1250)), ranks=2)


def test_the_sweep_shows_peers_and_interference(make_verdict, swept):
    """Per arm, batch size and peers: lookups, their P95, what the peers read together, and the slowed main compute."""
    page = markdown.render(Account([make_verdict()], [swept]), {})
    rows = {tuple(row[:3]): row[3:] for row in _rows(page, "Batch sizes")}
    assert rows["B", "64", "1"] == ["2.0 µs", "2.0 µs", "405.5 GB/s", "0 ns", "1.3 µs", "+25.0 %", "1"]
    assert rows["B", "64", "2"][2] == "811.0 GB/s"
    assert rows["A", "64", "1"][5] == "+0.0 %"
    assert "![main compute beside lookups](interference-B1.svg)" in page
    assert "svg" not in markdown.render(Account([make_verdict()], [replace(swept, runs=())]), {})


def test_the_map_counts_no_run_with_a_problem(swept):
    """A run that ended in a problem is neither in the slowdown nor in its n."""
    assert figure.interference(swept)["B", 64] == (0.25, 1)
    lost = Problem(code="rank-died", message="rank 1 left")
    ended = replace(swept.runs[1], index=2, problems=(lost,))
    assert figure.interference(replace(swept, runs=(*swept.runs, ended)))["B", 64] == (0.25, 1)


def test_the_map_is_a_picture_that_stands_alone(tmp_path, swept):
    """The SVG is well-formed XML with units, arms and n in every cell, and refers to nothing outside itself."""
    figure.write_figures(tmp_path, [swept, swept])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["interference-B1.2.svg", "interference-B1.svg"]
    text = (tmp_path / "interference-B1.svg").read_text()
    nodes = [*ElementTree.fromstring(text).iter()]  # noqa: S314 - our own file
    words = [node.text for node in nodes if node.tag.endswith("text")]
    assert {"+0.0 % (n = 1)", "+25.0 % (n = 1)", "64 / 792.0 KiB", "submission at consumption"} <= set(words)
    assert "href" not in text
    fills = [node.get("fill") for node in nodes if node.tag.endswith("rect")]
    assert fills[1:] == ["#ffffff", "#eab0a6"]


def test_hypotheses_stand_before_the_experiments(make_verdict, make_evidence):
    """All four have their outcome and what is missing; without evidence there is no such table."""
    page = markdown.render(Account([make_verdict()], [make_evidence()]), {})
    titles = re.findall(r"^(\d)\. .*: \*\*undecided\*\*\n\n   - ", page, re.M)
    assert titles == ["1", "2", "3", "4"]
    assert page.index("## Hypotheses") < page.index("## B1")
    assert "no recommendation: no-schedule" in page
    assert "Hypotheses" not in markdown.render(Account([make_verdict()], []), {})
