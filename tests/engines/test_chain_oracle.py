"""A step uses its rows: its hidden states equal those of an oracle that no path of a step computes."""

import numpy as np
import pytest

from pytest_engram.checks import check_engine, explain
from pytest_engram.engines.chain import Chain
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.model import Workload
from pytest_engram.serving.replay import fixed_batches


class Zeros(CpuEngine):
    """Rows are staged, and zeros projected."""

    def _collect(self, layer, tokens):
        return np.zeros_like(super()._collect(layer, tokens))


class OtherLayer(CpuEngine):
    """Each layer projects the other's rows."""

    def _collect(self, layer, tokens):
        super()._collect(layer, tokens)
        return self._whole[1 - self._tables[layer], :tokens]


class OneHead(CpuEngine):
    """One of the heads is lost between staging and projection."""

    def _collect(self, layer, tokens):
        rows = super()._collect(layer, tokens).copy()
        rows[:, 3] = 0
        return rows


class NoGate(CpuEngine):
    """The gate is left out: its layers hand the hidden states on."""

    def _forward(self, hidden, keep, tickets, settings):
        return super()._forward(hidden, np.zeros_like(keep), tickets, settings)


class Undead(CpuEngine):
    """Dead tokens pass the gate."""

    def _forward(self, hidden, keep, tickets, settings):
        return super()._forward(hidden, np.ones_like(keep), tickets, settings)


class Swapped(CpuEngine):
    """The value is taken for the key."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        honest = self._chain.project
        self._chain.project = lambda rows: honest(rows)[::-1]


class Shortened(CpuEngine):
    """The last layer of the main compute is skipped."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._stretches[-1] -= 1


FAULTS = (Zeros, OtherLayer, OneHead, NoGate, Undead, Swapped, Shortened)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("kind", [CpuEngine, *FAULTS], ids=lambda kind: kind.__name__)
def test_gate_0_sees_that_a_step_uses_its_rows(bench, kind, tokens):
    """L11: zeros, the other layer's rows, a lost head, no gate, dead tokens or a swapped key fail at the first way."""
    engine = bench.engine(kind=kind)
    token_map = np.arange(129_280, dtype=np.int32) % bench.layout.compressed_vocab
    engine._hasher = engine._setup.backend.hasher(bench.layout, token_map, slot_cache=False)
    batch = next(fixed_batches(Workload(tokens=tokens), 1, bench.vocabulary, "low-reuse"))
    found = check_engine(engine, batch, StepSettings(), bench.layout, token_map, bench.seed)
    failed = [explain(sample) for sample in found if not sample.passed]
    assert len(failed) == (kind is not CpuEngine)
    assert all("engine-outputs" in each and "whole: output" in each for each in failed)


def test_honest_noise_is_far_below_the_tolerance(bench):
    """A step's float32 differs from float64 by less than a thirtieth of what gate 0 allows."""
    engine = bench.engine(hidden=256, layers=16)
    batch = next(fixed_batches(Workload(tokens=16), 1, bench.vocabulary, "low-reuse"))
    _, rows = engine.rows(batch, StepSettings())
    wanted = engine.oracle(batch, rows.swapaxes(0, 1))
    seen = engine.step(batch, StepSettings(), marks=False).output
    away = np.sqrt(np.square(seen - wanted).mean(axis=1) / np.square(wanted).mean(axis=1))
    assert 0 < away.max() < engine.tolerance / 30


def plain(chain, hidden, number, context=None):
    """A layer of the chain in float64."""
    state = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-6)
    if context is not None:
        keys, values = (each.float().numpy()[0].astype(np.float64) for each in context)  # [heads, context, 64]
        query = state.reshape(len(state), len(keys), -1).swapaxes(0, 1)
        scores = np.exp(query @ keys.swapaxes(1, 2) / query.shape[2] ** 0.5)
        seen = scores / scores.sum(axis=2, keepdims=True) @ values
        state = state + seen.swapaxes(0, 1).reshape(state.shape)
    for weight in chain._gemms[number]:
        state = state @ chain._host(weight).astype(np.float64)
    return (hidden + state) * 0.5**0.5


@pytest.mark.parametrize(("kind", "allowed"), [("numpy", 1e-6), ("torch", 0.02)])
def test_a_layer_of_the_main_compute_is_its_formula(bench, kind, allowed):
    """The oracle's main compute is the engine's own: each layer of it equals float64's, with attention on torch."""
    work = Workload(hidden=128, layers=3, engram_layers=(1,), tokens=8, gemms_per_layer=3)
    if kind == "numpy":
        chain, context = Chain(bench.layout, work, 1), None
    else:
        torch = pytest.importorskip("torch")
        from pytest_engram.engines.chain import TorchChain

        chain = TorchChain(bench.layout, work, 1, torch.device("cpu"))
        context = chain._context
    hidden = np.random.default_rng(0).standard_normal((8, 128), dtype=np.float32)
    for number in range(3):
        wanted = plain(chain, hidden.astype(np.float64), number, context)
        away = chain._host(chain.layer(chain._placed(hidden), number)) - wanted
        assert np.sqrt((away**2).mean() / (wanted**2).mean()) < allowed


def test_the_cuda_chain_has_an_oracle_too(bench):
    """bf16 steps of the torch chain stay far below the CUDA engine's tolerance of their oracle."""
    torch = pytest.importorskip("torch")
    from pytest_engram.engines.chain import TorchChain
    from pytest_engram.engines.cuda import CudaEngine
    from pytest_engram.rows import gated_residual

    work = Workload(hidden=128, layers=3, engram_layers=(1,), tokens=8, gemms_per_layer=3)
    chain = TorchChain(bench.layout, work, 1, torch.device("cpu"))
    tokens, keep = np.arange(8), np.arange(8) % 3 > 0
    bits = np.random.default_rng(0).standard_normal((8, bench.layout.columns, 64), dtype=np.float32).view(np.uint32)
    rows = (bits >> 16).astype(np.uint16)
    state = chain.layer(chain.embed(torch.from_numpy(tokens)), 0)
    projected = chain.project(torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16))
    state = gated_residual(state, *projected, chain.query_norm, chain.key_norm, keep=torch.from_numpy(keep), xp=torch)
    for number in (1, 2):
        state = chain.layer(state, number)
    wanted = chain.oracle(tokens, keep, {1: rows})
    away = np.sqrt(np.square(state.numpy() - wanted).mean(axis=1) / np.square(wanted).mean(axis=1))
    assert 0 < away.max() < CudaEngine.tolerance / 4
    assert np.abs(chain.oracle(tokens, keep, {1: rows * 0}) - wanted).max() > CudaEngine.tolerance
