"""Write fixtures/golden/*.json with the scalar oracle only: ``python tests/oracles/make_golden.py``."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import scalar

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
SENTINEL = 129_264


def layout() -> dict[str, Any]:
    """Model constants that need no checkpoint."""
    tables = scalar.Tables()
    rows = [sum(row) for row in tables.primes]
    return {
        **scalar.MODEL,
        "multiplier_bound": (2**63 - 1) // scalar.MODEL["compressed_vocab"] // 2,
        "primes": tables.primes,
        "rows": rows,
        "table_bytes": sum(rows) * (256 + 8),
        "read_bytes_per_token": 2 * 24 * (256 + 8),
        "staged_bytes_per_token": 2 * 24 * 256 * 2,
    }


def batches() -> dict[str, dict[str, Any]]:
    """Small batches of every kind; token ids from Python's own generator."""
    draw = random.Random(41)  # noqa: S311 - test data

    def tokens(count: int) -> list[int]:
        return [draw.randrange(129_000) for _ in range(count)]

    def batch(ids: list[int], start: int, window: list[int], dead: tuple[int, ...] = ()) -> dict[str, Any]:
        return {
            "token_ids": ids,
            "positions": list(range(start, start + len(ids))),
            "query_start_loc": [0, len(ids)],
            "dead": [token == SENTINEL or at in dead for at, token in enumerate(ids)],
            "window": [window],
            "window_dead": [[token == SENTINEL for token in window]],
        }

    image = tokens(3)
    return {
        "first-chunk": batch(tokens(5), 0, [-1, -1, -1]),
        "later-chunk": batch(tokens(3), 9, tokens(3)),
        "dead-token": batch(tokens(5), 0, [-1, -1, -1], dead=(1,)),
        "image": batch([image[0], SENTINEL, image[1]], 4, [image[2], SENTINEL, image[0]]),
        "unknown-window": batch(tokens(2), 9, [-1, *tokens(1), -1]),
    }


def hash_ids() -> dict[str, Any]:
    """Each batch with its ids."""
    tables, token_map = scalar.Tables(), scalar.token_map()
    return {
        name: {**batch, "ids": scalar.hash_batch(tables, SimpleNamespace(**batch), token_map)}
        for name, batch in batches().items()
    }


def rows() -> dict[str, Any]:
    """Digest of all 65,536 products in order scale byte, value byte, and some of them in full."""
    products = [scalar.bf16_bits(code, scale) for scale in range(256) for code in range(256)]
    shown = [
        (0, 0x38),
        (0, 0xB8),
        (1, 0x38),
        (1, 0x01),
        (127, 0x7E),
        (254, 0x38),
        (254, 0x7E),
        (255, 0x38),
        (255, 0),
        (127, 0x7F),
    ]
    return {
        "sha256_little_endian_u16": hashlib.sha256(struct.pack("<65536H", *products)).hexdigest(),
        "examples": [{"scale": scale, "value": code, "bf16": products[scale * 256 + code]} for scale, code in shown],
    }


def main() -> None:
    """Write every file."""
    for name, content in (("layout", layout()), ("hash_ids", hash_ids()), ("rows", rows())):
        (GOLDEN / f"{name}.json").write_text(_compact(content) + "\n")


def _compact(content: dict[str, Any]) -> str:
    """One line per top-level key."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main()
