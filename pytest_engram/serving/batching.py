"""Sequences, the batches that a step runs, and the next token: what timed and untimed serving share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pytest_engram.hashing import IMAGE_SENTINEL_ID, HashBatch, window_row
from pytest_engram.serving.replay import Request

_GROUPS, _CHOICES = 8, 16  # 8 arg-maxima over 16 logits each: 32 bits of the output decide the next token


class Stream:
    """One running request: its token history, and how much of it the model has seen."""

    __slots__ = ("computed", "history", "request")

    def __init__(self, request: Request, *, computed: int = 0) -> None:
        self.request, self.history, self.computed = request, list(request.prompt), computed

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen: a chunk of the prompt, or one after decoding."""
        return len(self.history) - self.computed

    @property
    def outputs(self) -> tuple[int, ...]:
        """The tokens that were generated so far."""
        return tuple(self.history[len(self.request.prompt) :])

    @property
    def finished(self) -> bool:
        """All tokens that the request asked for were generated."""
        return len(self.history) - len(self.request.prompt) >= self.request.output_tokens

    def drafted(self, count: int) -> Stream:
        """The same request with ``count`` wrong tokens behind its own."""
        draft, words = Stream(self.request, computed=self.computed), self.request.vocabulary
        draft.history = self.history + [(token + 1) % words for token in self.history[-count:]]
        return draft


def schedule(running: Iterable[Stream], budget: int) -> list[tuple[Stream, int]]:
    """(stream, tokens) in order of admission within ``budget``: decodes of older requests, then chunks of prompts."""
    chosen = []
    for stream in running:
        take = min(stream.pending, budget)
        if take > 0:
            chosen.append((stream, take))
            budget -= take
    return chosen


def ends(chosen: Iterable[tuple[Stream, int]]) -> Any:
    """Where each stream's tokens end in the batch, int [R]."""
    return np.cumsum([take for _, take in chosen])


def compose(chosen: Sequence[tuple[Stream, int]]) -> HashBatch:
    """One ragged batch; every request brings its own positions and, from its history, the window before its chunk."""
    chunks = [(stream.history, stream.computed, stream.computed + take) for stream, take in chosen]
    tokens = np.array([token for history, start, end in chunks for token in history[start:end]], np.int32)
    window = np.array([window_row(history, start) for history, start, _ in chunks], np.int32)
    return HashBatch(
        token_ids=tokens, dead=tokens == IMAGE_SENTINEL_ID, window=window, window_dead=window == IMAGE_SENTINEL_ID,
        positions=np.concatenate([np.arange(start, end, dtype=np.int64) for _, start, end in chunks]),
        query_start_loc=np.concatenate([[0], ends(chosen)]).astype(np.int32),
    )  # fmt: skip


def advance(chosen: Sequence[tuple[Stream, int]], output: Any) -> list[Stream]:
    """Account for a step with hidden states float32 [T, D]; the streams that got a next token, appended to them."""
    decoded = []
    for (stream, take), choice in zip(chosen, next_tokens(output[ends(chosen) - 1]), strict=True):
        stream.computed += take
        if stream.pending == 0:
            stream.history.append(choice % stream.request.vocabulary)
            decoded.append(stream)
    return decoded


def next_tokens(output: Any) -> list[int]:
    """A whole number below 2**32 per row of ``output`` float32 [R, D].

    Arg-maxima do not see the last bits in which matmuls of different batch sizes differ; a wrong Engram row moves them.
    """
    logits = (output @ _head(output.shape[1])).reshape(len(output), _GROUPS, _CHOICES)
    weights = _CHOICES ** np.arange(_GROUPS, dtype=np.int64)
    numbers: list[int] = (logits.argmax(axis=2) @ weights).tolist()
    return numbers


@lru_cache(maxsize=4)
def _head(hidden: int) -> Any:
    return np.random.default_rng(hidden).standard_normal((hidden, _GROUPS * _CHOICES), dtype=np.float32)
