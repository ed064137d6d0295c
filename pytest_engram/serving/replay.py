"""What clients send: a seeded load of requests, and the fixed batches of the mechanism gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pytest_engram.hashing import HashBatch
from pytest_engram.model import ServingPlan, Workload

_LOOKBACK = 3  # tokens before a chunk that the longest n-gram, 4, can reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: its client sends it ``arrival_s`` seconds after the load began, whatever the server does.

    ``vocabulary`` bounds the prompt's token ids and the generated ones.
    """

    index: int
    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    vocabulary: int


def make_load(plan: ServingPlan, seed: int, vocabulary: int) -> tuple[Request, ...]:
    """``plan.requests`` requests in order of arrival; only the plan, the seed and the vocabulary decide.

    Lengths are uniform over their closed ranges; gaps are exponential ("poisson") or equal ("fixed").
    """
    rng = np.random.default_rng([seed, plan.requests])
    gaps = rng.exponential(size=plan.requests) if plan.arrivals == "poisson" else np.ones(plan.requests)
    arrivals = np.cumsum(gaps) / plan.rate
    prompts, outputs = (
        rng.integers(low, high + 1, size=plan.requests) for low, high in (plan.prompt_tokens, plan.output_tokens)
    )
    return tuple(
        Request(
            index=index, arrival_s=float(arrivals[index]), output_tokens=int(outputs[index]), vocabulary=vocabulary,
            prompt=tuple(rng.integers(0, vocabulary, size=int(prompts[index])).tolist()),
        )
        for index in range(plan.requests)
    )  # fmt: skip


def fixed_batches(workload: Workload, seed: int, vocabulary: int, state: str) -> Iterator[HashBatch]:
    """Endless batches of ``workload.tokens`` tokens, each one chunk with a known window.

    "low-reuse" draws fresh tokens every step, so almost every row is new; "repeated" keeps the first step's.
    """
    rng = np.random.default_rng([seed, workload.tokens])
    while True:
        tokens = rng.integers(0, vocabulary, size=workload.tokens + _LOOKBACK, dtype=np.int32)
        batch = HashBatch.sequence(tokens[_LOOKBACK:], history=tokens[:_LOOKBACK].tolist())
        yield batch
        while state == "repeated":
            yield batch
