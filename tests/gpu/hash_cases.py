"""Every contract case of hash ids through the hash kernels under Triton's interpreter; prints {case: null or text}.

A program of its own, because the interpreter must be chosen before Triton is imported and would leak into other tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

import numpy as np

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.cases.hash import HASH_CASES
from pytest_engram.cases.slots import SLOT_CASES
from pytest_engram.checks import check, explain
from pytest_engram.errors import UsageError
from pytest_engram.gpu.hash import DeviceHasher
from pytest_engram.hashing import EngramLayout, HashBatch, dummy_ids, hash_ids

CASES = (*HASH_CASES, *SLOT_CASES)
LAYOUT = EngramLayout.for_rows(5000, (1, 3), n_heads=3, max_ngram=3, head_dim=64, compressed_vocab=500)
TOKEN_MAP = np.arange(1000, dtype=np.int32) % 500


class Hasher(DeviceHasher):
    """The device's hasher on ``place``, with the reference's dummy batch."""

    place = "cpu"

    def __init__(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> None:
        super().__init__(layout, token_map, self.place)
        self.layout, self.slots = layout, slot_cache

    def bind(self, num_slots: int) -> None:
        if self.slots:
            super().bind(num_slots)

    def dummy(self, tokens: int) -> tuple[Any, Any]:
        return dummy_ids(self.layout, tokens), np.zeros(tokens, dtype=bool)


class Backend(ReferenceBackend):
    """The reference backend with the device's hasher."""

    name, kind = "device-hash", Hasher

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Any:
        return self.kind(layout, token_map, slot_cache=slot_cache)


def contract(backend: Backend) -> dict[str, str | None]:
    """What each contract case says."""
    samples = [check(backend, case, engine="cpu") for case in CASES]
    found = {sample.case: None for sample in samples}
    return {**found, **{sample.case: explain(sample) for sample in samples if sample.supported and not sample.passed}}


def random_batch(rng: Any, requests: int, most: int) -> HashBatch:
    """Ragged requests, empty ones among them, with dead tokens, unknown windows and late starts."""
    parts = []
    for _ in range(requests):
        count, past = (int(number) for number in (rng.integers(0, most), rng.integers(0, 5)))
        history = None if rng.random() < 0.2 else rng.integers(0, 1000, past).tolist()
        parts.append(
            HashBatch.sequence(
                rng.integers(0, 1000, count), start=past, history=history, dead=rng.random(count) < 0.1,
                history_dead=None if history is None else rng.random(past) < 0.2,
            )
        )  # fmt: skip
    return HashBatch.concat(parts)


def differing(hasher: Any, layout: EngramLayout, seeds: range, requests: int = 9, most: int = 40) -> str | None:
    """The first seed whose random batch hashes differently."""
    for seed in seeds:
        batch = random_batch(np.random.default_rng(seed), requests, most)
        seen, expected = hasher(batch).cpu().numpy(), hash_ids(layout, batch, TOKEN_MAP)
        if seen.dtype != np.int32 or not np.array_equal(seen, expected):
            return f"seed {seed}: {np.argwhere(seen != expected)[:1].tolist()}"
    return None


def case_random_batches() -> str | None:
    """H5-H11: ragged random batches over several tiles, and a layout whose heads are no power of two."""
    return differing(Hasher(LAYOUT, TOKEN_MAP, slot_cache=False), LAYOUT, range(12))


def case_wrong_ids_are_found() -> str | None:
    """Negative control: another token map gives other ids, and the comparison sees it."""
    other = Hasher(LAYOUT, np.roll(TOKEN_MAP, 1), slot_cache=False)
    return None if differing(other, LAYOUT, range(1)) else "the ids of another token map passed"


def case_staging_returns_tokens_and_keep() -> str | None:
    """What a step needs besides ids comes with the same copy: token ids, and the mask of tokens that are not dead."""
    batch = random_batch(np.random.default_rng(3), 5, 30)
    _, tokens, keep = Hasher(LAYOUT, TOKEN_MAP, slot_cache=False).stage(batch)
    same = np.array_equal(tokens.numpy(), batch.token_ids) and np.array_equal(keep.numpy(), ~batch.dead)
    return None if same else "tokens or keep differ"


def case_inputs_keep_their_alignment() -> str | None:
    """H19: whatever the token count, each input starts on a multiple of 16 bytes within the one copy."""
    seen = set()
    for tokens in (1, 7, 256):
        kinds = np.int32, np.int64, np.bool_, np.int32
        parts = Hasher(LAYOUT, TOKEN_MAP, slot_cache=False)._send(*(np.zeros(tokens, kind) for kind in kinds))
        seen |= {(part.data_ptr() - parts[0].data_ptr()) % 16 for part in parts}
    return None if seen == {0} else f"offsets {sorted(seen)}"


def case_bad_batches_are_refused() -> str | None:
    """Token ids beyond the map, and a bound cache without slots, are errors before anything is launched."""
    plain, cached = (Hasher(LAYOUT, TOKEN_MAP, slot_cache=slots) for slots in (False, True))
    cached.bind(8)
    paged = HashBatch.sequence([1, 2], slots=[0, 8], block_table=[0])
    wrong: dict[str, Callable[[], Any]] = {
        "token 1000": lambda: plain(HashBatch.sequence([1000])),
        "window 1000": lambda: plain(HashBatch.sequence([1], history=[1000])),
        "no slots": lambda: cached(HashBatch.sequence([1])),
        "slot 8 of 8": lambda: cached(paged),
    }
    return next((f"{name} passed" for name, action in wrong.items() if not refused(action)), None)


def refused(action: Callable[[], Any]) -> bool:
    """Whether the action is a usage error."""
    try:
        action()
    except UsageError:
        return True
    return False


def main() -> None:
    """Run every case."""
    own = {name: case() for name, case in globals().items() if name.startswith("case_")}
    json.dump({**own, **contract(Backend())}, sys.stdout)


if __name__ == "__main__":
    main()
