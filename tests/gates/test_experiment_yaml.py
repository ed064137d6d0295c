"""Experiments are read strictly: every mistake is named with its line before anything is measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_engram import experiment
from pytest_engram.engines.backings import CUDA_BACKINGS
from pytest_engram.errors import UsageError
from pytest_engram.experiment_rules import RULE_LISTS
from pytest_engram.model import Claim
from pytest_engram.numa.backing import BACKINGS
from pytest_engram.policies import BACKING_NAMES

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "experiments"
B1 = """\
id: B1
title: submit the lookups early against at their consumers
why: >
  The lookup is issued on its own stream as soon as the hashes are ready.  If its rows are there before the consuming
  layer arrives, the wait disappears; if the main compute pays for it, nothing is gained.
claim: improves
subject: suite loop
variable: submission
arms:
  A: {submission: at_consumption}
  B: {submission: early}
hold: {policy: default, backing: tmpfs, cap: null, grid: background}
direction_note: exposed wait shrinks; main compute stays within 5 %; goodput rises at the same limits and load
unit: replay
ranks: 1
blocks: 8
cooldown_s: 0.1
aa_level: 0.01
alpha: 0.025
mechanism:
  - {metric: exposed_wait, direction: down, margin: 0.0}
no_offset:
  - {metric: main_compute, direction: down, margin: 0.05}
end_to_end:
  - {metric: goodput, direction: up, margin: 0.0}
guards:
  - {metric: rejection_rate, direction: down, margin: 0.01}
  - {metric: ttft_p95, direction: down, margin: 0.02}
  - {metric: ttft_p99, direction: down, margin: 0.02}
  - {metric: itl_p95, direction: down, margin: 0.02}
  - {metric: itl_p99, direction: down, margin: 0.02}
workload:
  hidden: 256
  layers: 8
  engram_layers: [1, 6]
  tokens: 64
  steps: 24
  warmup: 4
  rows: 0
  reuse: low-reuse
  gemms_per_layer: 2
serving:
  rate: 100.0
  requests: 120
  prompt_tokens: [8, 24]
  output_tokens: [3, 5]
  slo: {ttft_ms: 60.0, itl_ms: 20.0}
  max_batch_tokens: 64
  max_running: 16
  max_waiting: 64
  timeout_s: 10.0
  arrivals: poisson
"""
A3 = (FOLDER / "A3.yaml").read_text()


def _load(text):
    return experiment.load_text(text, "some.yaml")


def _line_of(text, needle):
    return 1 + text[: text.index(needle)].count("\n")


def _refused(text, needle=None):
    """The error of a text; with ``needle`` its line must be the one that the message names."""
    with pytest.raises(UsageError) as caught:
        _load(text)
    assert caught.value.code == "bad-experiment"
    assert caught.value.expected
    if needle:
        assert f"some.yaml:{_line_of(text, needle)}:" in str(caught.value)
    return str(caught.value)


def test_the_suites_own_experiments_load():
    """All six load, with the claims, variables and requirements that the method fixes."""
    found = experiment.load_all(FOLDER)
    assert {e.id: (e.variable, e.claim) for e in found.values()} == {
        "A1": ("policy", Claim.CHARACTERISES), "A2": ("policy", Claim.CHARACTERISES),
        "A3": ("policy", Claim.IMPROVES), "B1": ("submission", Claim.IMPROVES),
        "B2": ("cap", Claim.CHARACTERISES), "patch": ("backend", Claim.IMPROVES),
    }  # fmt: skip
    assert found["A3"].requires == ("A1", "B1")
    assert found["B2"].engines == ("cuda",)
    assert all(e.why and e.direction_note and e.source.endswith(f"{e.id}.yaml") for e in found.values())
    assert all(getattr(e, name) for e in found.values() for name in RULE_LISTS)


def test_the_rules_know_every_backing():
    """The names that an experiment may give are those of the kernel's objects and of the engines'."""
    assert {*BACKING_NAMES} == {*BACKINGS, *CUDA_BACKINGS}


def test_a_model_stands_where_the_workload_gives_nothing():
    """A preset's entries are taken, explicit ones win, and the result is as if all had been written out."""
    bare = re.sub(r"  (hidden|layers|engram_layers|tokens|gemms_per_layer): .*\n", "", B1)
    work = _load(bare.replace("workload:", "workload:\n  model: deepseek-v4.1\n  layers: 16")).workload
    assert (work.hidden, work.layers, work.engram_layers, work.tokens, work.gemms_per_layer) == (
        5120, 16, (1, 14), 8192, 14
    )  # fmt: skip
    assert work.model == "deepseek-v4.1"
    assert replace(_load(bare.replace("workload:", "workload:\n  model: cpu")).workload, model="") == _load(B1).workload


def test_every_preset_is_a_workload():
    """Each shipped model loads, keeps its Engram layers inside its stack and names no setting of an experiment."""
    for name in experiment.models():
        work = _load(B1.replace("workload:", f"workload:\n  model: {name}")).workload
        assert work.engram_layers[-1] < work.layers
    with pytest.raises(UsageError, match="unknown key"):
        _load(B1.replace("  tokens: 64", "  tokens: 64\n  depth: 4"))


@pytest.mark.parametrize("folder", ["cuda", "more"])
def test_the_further_experiments_load(folder):
    """The GPU's and the engines' variants are experiments, too; huge-page twins differ in backing, arms and sizes."""
    found = experiment.load_all(FOLDER / folder)
    assert {"B1-inline", "B1-wait", "B1-streams"} <= found.keys()
    for twin in (name for name in found if name.endswith("-huge")):
        plain, huge = found[twin.removesuffix("-huge")], found[twin]
        assert (huge.hold["backing"], huge.ranks) == ("anon-thp", 1)
        same = {"id": plain.id, "title": plain.title, "source": plain.source, "hold": plain.hold, "arms": plain.arms}
        assert replace(huge, **same, workload=replace(huge.workload, sizes=plain.workload.sizes)) == plain
        assert {**huge.hold, "backing": "tmpfs"} == plain.hold
        assert huge.arms.items() <= plain.arms.items()


def test_ranks_that_share_heads_have_no_loads_of_their_own():
    """They take every step together, so each with its own clients is refused, and without is not."""
    text = B1.replace("ranks: 1", "ranks: 2").replace("  tokens: 64", "  tokens: 64\n  tensor_parallel: true")
    assert "take every step together" in _refused(text)
    lone = re.sub(r"end_to_end:\n.*?workload:", "end_to_end: []\nguards: []\nworkload:", text, flags=re.S)
    assert _load(lone[: lone.index("serving:")].replace("improves", "characterises")).workload.tensor_parallel


def test_b1_fits_a_small_machine():
    """The default B1 keeps its own floor (load and cool-down) below half a minute per ten runs."""
    b1 = experiment.load(FOLDER / "B1.yaml")
    assert (b1.cooldown_s + b1.serving.requests / b1.serving.rate) * 3 * b1.blocks < 45


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("blocks: 8", "blokcs: 8", "'blocks'?"),
        ("  hidden: 256", "  hiden: 256", "'hidden'?"),
        ("blocks: 8", "blocks: 8\nblocks: 9", "key given twice"),
        ("blocks: 8", "blocks: many", "a whole number"),
        ("blocks: 8", "blocks: 8.0", "a whole number"),
        ("blocks: 8", "blocks: 8_", "8_, which YAML 1.1 does not read as decimal"),
        ("blocks: 8", f"blocks: {'9' * 5000}", "99, which YAML 1.1 does not read as decimal"),
        ("alpha: 0.025", "alpha: 0._5", "a number"),
        ("cap: null", "cap: 9999999999", "a number of programs"),
        ("requests: 120", "requests: 9999999999", "at most 1048576"),
        ("metric: ttft_p99", "metric: ttft_p99@²", "NAME@RANK"),
        ("blocks: 8", "blocks: 010", "does not read as decimal"),
        ("blocks: 8", "blocks: 1:30", "does not read as decimal"),
        ("blocks: 8", "blocks: 5", "at least 6"),
        ("alpha: 0.025", "alpha: 25e-3x", "a number"),
        ("alpha: 0.025", "alpha: 0.5", "up to 0.05"),
        ("alpha: 0.025", "alpha: 0", "above 0"),
        ("alpha: 0.025", "alpha: .nan", "finite"),
        ("aa_level: 0.01", "aa_level: 0", "two-sided"),
        ("cooldown_s: 0.1", "cooldown_s: -1", "at least 0"),
        ("claim: improves", "claim: wins", "improves, characterises"),
        ("claim: improves", "claim: on", "truth value"),
        *[("subject: suite loop", f"subject: {word}", "suite loop") for word in ("served engine", "engine modules")],
        ("unit: replay", "unit: minute", "allocation"),
        ("unit: replay", "unit: server", "one of: allocation, replay"),
        ("variable: submission", "variable: weather", "policy, submission, cap, backend, wait, inline_above, streams"),
        ("cap: null, grid", "cap: null, wait: queue, grid", "layer (its own lookup) or stream"),
        ("cap: null, grid", "cap: null, inline_above: -1, grid", "null or a number of tokens"),
        ("cap: null, grid", "cap: null, inline_above: true, grid", "null or a number of tokens"),
        ("cap: null, grid", "cap: null, streams: 3, grid", "2 as a negative control"),
        ("cap: null, grid", "cap: null, streams: true, grid", "2 as a negative control"),
        ("cap: null, grid", "cap: null, graph: 1, grid", "replay a CUDA graph"),
        ("  tokens: 64", "  tokens: 64\n  sizes: [0, 8]", "rising numbers of tokens"),
        ("  tokens: 64", "  tokens: 64\n  sizes: [8, 1]", "rising numbers of tokens"),
        ("  tokens: 64", "  tokens: 64\n  model: gpt", "one of: cpu, deepseek-v4.1, v4.1-short"),
        ("  tokens: 64", "  tokens: 64\n  model: 4", "text"),
        ("  tokens: 64", "  tokens: 64\n  sizes: [-1, 8]", "1 to 65536"),
        ("  tokens: 64", "  tokens: 64\n  sizes: [65537]", "1 to 65536"),
        ("  tokens: 64", "  tokens: 65537", "at most 65536"),
        ("  hidden: 256", "  hidden: 65537", "at most 65536"),
        ("  layers: 8", "  layers: 1025", "at most 1024"),
        ("  steps: 24", "  steps: 100001", "at most 100000"),
        ("ranks: 1", "ranks: 65", "at most 64"),
        ("blocks: 8", "blocks: 1001", "at most 1000"),
        ("backing: tmpfs", "backing: floppy", "one of: tmpfs, memfd, hugetlb, anon-thp, pinned, cumem"),
        ("direction: down, margin: 0.05", "direction: down, margin: -0.05", "a share"),
        ("direction: down, margin: 0.05", "direction: up, margin: 0.05", "where good lies"),
        ("metric: main_compute", "metric: main_computer", "one of: lookup"),
        ("metric: main_compute", "metric: main_compute@1", "NAME@RANK"),
        ("prompt_tokens: [8, 24]", "prompt_tokens: [24, 8]", "least, most"),
        ("prompt_tokens: [8, 24]", "prompt_tokens: [8]", "expected 2"),
        ("prompt_tokens: [8, 24]", "prompt_tokens: 8", "a list"),
        ("engram_layers: [1, 6]", "engram_layers: [1, 8]", "below 8"),
        ("reuse: low-reuse", "reuse: cold", "low-reuse or repeated"),
        ("arrivals: poisson", "arrivals: bursty", "poisson or fixed"),
        ("rate: 100.0", "rate: 0", "above 0"),
        ("ttft_ms: 60.0", "ttft_ms: 0", "above 0"),
        ("B: {submission: early}", "B: {submission: soon}", "early or at_consumption"),
        ("B: {submission: early}", "B: {submission: early, cap: 8}", "second changed variable"),
        ("B: {submission: early}", "B: {cap: 8}", "second changed variable"),
        ("B: {submission: early}", "B: {}", "submission missing"),
        ("B: {submission: early}", "B: {submission: at_consumption}", "same as A"),
        ("B: {submission: early}", "B: {cpu_offload: false}", "moves the weights"),
        ("B: {submission: early}", "B: {submission: early, grid: foreground}", "background grid"),
        ("hold: {policy: default", "hold: {submission: early, policy: default", "held and changed"),
        ("hold: {policy: default", "hold: {policy: bind", "bind:N"),
        ("hold: {policy: default", "hold: {weather: fine, policy: default", "unknown setting"),
        ("hold: {policy: default", "hold: {policy: off", "truth value"),
        ("unit: replay", "unit: replay\npositive_control: true", "placement only"),
        ("unit: replay", "unit: replay\nengines: [tpu]", "cpu, cuda"),
        ("unit: replay", "unit: replay\nrequires: [B1]", "itself"),
        ("ranks: 1", "ranks: 0", "at least 1"),
        ("ranks: 1", "ranks: true", "a whole number"),
        ("id: B1", "id: B 1", "letters"),
        ("id: B1", "id: 1", "text"),
        ("id: B1", "source: elsewhere", "unknown key"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_line(old, new, says):
    """Each mistake names file, line, what was seen and what is expected."""
    assert old in B1
    text = B1.replace(old, new, 1)
    message = _refused(text, new.rpartition("\n")[2].strip() if "\n" in new else new)
    assert says in message


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("margin: 0.05", "margin: 0", "  - {metric: main_compute", "never be shown"),
        ("metric: ttft_p99", "metric: ttft_p95", "  - {metric: itl_p95", "given twice"),
        ("requests: 120", "requests: 90", "  - {metric: itl_p95", "90 samples planned; expected at least 100"),
        ("  B: {submission", '  "A\'": {submission', "arms:", "A' is added here"),
        ("  tokens: 64", "  tokens: 64\n  tensor_parallel: true", "ranks: 1", "at least 2, which share the heads"),
    ],
)
def test_a_contradiction_is_refused_at_one_of_its_ends(old, new, line, says):
    """What contradicts another place is named at the entry that cannot hold."""
    message = _refused(B1.replace(old, new, 1))
    found = int(re.search(r"some\.yaml:(\d+)", message)[1])
    assert abs(found - _line_of(B1, line)) <= 1
    assert says in message


def test_a_missing_key_is_named():
    """The keys that are missing are listed, at the mapping that lacks them."""
    assert "blocks missing" in _refused(B1.replace("blocks: 8\n", ""))
    assert "slo missing" in _refused(re.sub(r"  slo: .*\n", "", B1))


def test_refused_baseline_of_a3():
    """Unsharing the table is no private-copy baseline."""
    assert "private-copy" in _refused(A3.replace('{policy: "bind:0"}', "{dp_shared_memory: false}"))


def test_a_placement_needs_fresh_allocations():
    """Pages are placed once per allocation, so a replay cannot be the unit of a placement experiment."""
    assert "allocation" in _refused(A3.replace("unit: allocation", "unit: replay"))


def test_holm_must_be_reachable():
    """Too few blocks for the number of tests that share the level is refused, with the number that would do."""
    text = re.sub(r"blocks: \d+", "blocks: 8", (FOLDER / "B2.yaml").read_text())
    assert "at least 9" in _refused(text)


def test_an_improvement_needs_all_gates():
    """`claim: improves` without an end-to-end metric could only ever pass on a mechanism."""
    text = B1.replace("end_to_end:\n  - {metric: goodput, direction: up, margin: 0.0}\n", "end_to_end: []\n")
    assert "five gates" in _refused(text)


def test_served_metrics_need_a_load():
    """Goodput without a serving section is refused."""
    assert "without a load" in _refused(B1[: B1.index("serving:")])


@pytest.mark.parametrize(
    "text", ["", "[]", "a: [", "just words", "\ta: b", "a: &a [*a]", "a: &a [1]\nb: *a", "a: " + "[" * 3000]
)
def test_text_that_is_no_mapping(text):
    """Empty files, lists, broken or bottomless YAML, an alias: one sentence, no traceback."""
    _refused(text)


def test_settings_keep_their_types():
    """A cap of null stays None and a cap of 8 a number; numbers for float fields become floats."""
    b2 = experiment.load(FOLDER / "B2.yaml")
    assert b2.arms["A"] == {"cap": None}
    assert b2.arms["cap8"] == {"cap": 8}
    assert isinstance(_load(B1.replace("rate: 100.0", "rate: 100")).serving.rate, float)


def test_files_and_folders(tmp_path):
    """Folders are read in order of their names; a second id, an unreadable path and an empty folder are refused."""
    (tmp_path / "one.yaml").write_text(B1)
    assert list(experiment.load_all(tmp_path)) == ["B1"]
    with pytest.raises(UsageError, match=r"is taken by .*one\.yaml"):
        experiment.load_all([tmp_path, tmp_path / "one.yaml"])
    with pytest.raises(UsageError, match="No such file"):
        experiment.load_all([tmp_path / "two.yaml"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no experiment"):
        experiment.load_all(tmp_path / "empty")
