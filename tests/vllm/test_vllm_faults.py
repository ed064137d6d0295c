"""Negative controls on the real engine: one text of vLLM's own source changed, and the contract's line sees it."""

import shutil
from pathlib import Path

import pytest

from pytest_engram.backends.vllm_source import locate
from pytest_engram.checks import CASES, check, explain

pytest.importorskip("torch", reason="vLLM's modules need torch")
pytest.importorskip("triton", reason="vLLM's modules need Triton")

FAULTS = {  # name -> (contract line, texts of which at least one occurs, what stands there instead)
    "a block does not deepen": ("H6", ["blocked |= (lookback < 0)"], "blocked = (lookback < 0)"),
    "the window is one token late": ("H8", ["col = chunk_start - 1 - lookback"], "col = chunk_start - lookback"),
    "slots are not written": ("H12", ["tl.store(cache + slot, value, valid)"], "pass"),
    "scales are one byte low": ("L1", ["(scale.to(tl.int32) << 23)", "<< 23"], "(scale.to(tl.int32) << 22)"),
    "start is not owned": ("L3", ["(index >= vocab_start)"], "(index > vocab_start)"),
    "no clamp": ("L11", ["tl.maximum(tl.abs(dot), clamp_value)"], "tl.abs(dot)"),
    "no producer wait": (
        "P1", ["stream.wait_stream(torch.cuda.current_stream())", "stream.wait_stream(current)"], "pass"),
    "ids are not kept": ("P2", ["hash_ids.record_stream(stream)"], "pass"),
    "no consumer wait": ("P3", ["torch.cuda.current_stream().wait_event(event)"], "pass"),
    "the consumer waits for all layers": (
        "P3", ["torch.cuda.current_stream().wait_event(event)"],
        "torch.cuda.current_stream().wait_stream(self._prefetch_stream)"),
    "staging moves": (
        "P6", ["rows = self.staged_rows[: hash_ids.shape[0]]"],
        "self.old = self.staged_rows; self.staged_rows = self.old.clone(); rows = self.staged_rows[: len(hash_ids)]"),
    "lookups on the main stream": ("P7", ["with torch.cuda.stream(stream):"], "if True:"),
    "each rank decides by its own count": ("P8", ["num_tokens = int(dp.num_tokens_across_dp_cpu.max())"], "pass"),
    "views are made anew": ("P9", ["if self._view_src != src:"], "if True:"),
    "a private mapping": ("S2", ["flags=mmap.MAP_SHARED"], "flags=mmap.MAP_PRIVATE"),
    "pinned is not checked": ("S2", ["if not tensor.is_pinned():"], "if False:"),
    "errors stay with their rank": ("S3", ["if failures:"], "if False:"),
    "a file is left": ("S4", ['prefix="vllm_engram_", dir'], 'delete=False, prefix="vllm_engram_", dir'),
    "never unregistered": (
        "S5", ["weakref.finalize(owner, self._unregister, mapping, pointer)"], "weakref.finalize(owner, int)"),
    "no barrier after a load": ("S6", ["torch.distributed.barrier(group=self.group.cpu_group)"], "pass"),
    "the parameter may be replaced": (
        "S7", ['raise RuntimeError("Shared Engram parameter storage must not be replaced")'], "pass"),
    "a fallback without a word": ("S10", ["logger.warning_once("], "logger.debug("),
}  # fmt: skip
SINCE = {"each rank decides by its own count": "0.33.0"}


@pytest.fixture
def planted(vllm_version, tmp_path):
    """The engine with one text changed, as a checkout; files that it leaves in /dev/shm are removed."""
    shutil.copytree(locate(vllm_version).root / "vllm", tmp_path / "vllm")
    before = set(Path("/dev/shm").glob("vllm_engram_*"))

    def change(olds, new):
        from pytest_engram.backends.vllm import VllmBackend

        changed = 0
        for path in tmp_path.glob("vllm/models/**/*.py"):
            text = path.read_text()
            old = next((old for old in olds if old in text), None)
            if old:
                path.write_text(text.replace(old, new))
                changed += 1
        assert changed, f"none of {olds} in vLLM {vllm_version}"
        return VllmBackend(f"vllm@{tmp_path}")

    yield change
    for path in set(Path("/dev/shm").glob("vllm_engram_*")) - before:
        path.unlink()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_engine_is_seen(planted, vllm_version, name):
    """P4 and others: the case that passes on the release fails once its rule is taken out of the engine's source."""
    line, olds, new = FAULTS[name]
    if vllm_version < SINCE.get(name, ""):
        pytest.skip(f"vLLM {vllm_version} has no such rule")
    backend = planted(olds, new)
    if not backend.interpreted:
        pytest.skip("a planted race shows every time only on the virtual GPU")
    assert backend.engine.source.label == "unverified"
    samples = [check(backend, case) for case in CASES if case.contract == line]
    failed = [sample for sample in samples if sample.supported and not sample.passed]
    assert failed, [explain(sample) for sample in samples]
