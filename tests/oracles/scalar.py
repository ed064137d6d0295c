"""A second, independent implementation: plain Python integers and loops, one token and one byte at a time.

It shares no code with the package; tests compare the two, and ``make_golden.py`` writes the golden vectors with it.
"""

from __future__ import annotations

import math
import struct
from typing import Any

DEAD = -1
MODEL = {
    "layer_ids": [1, 14],
    "prime_search_start": 16_000_000,
    "compressed_vocab": 99_092,
    "pad_token_id": 2,
    "max_ngram": 4,
    "n_heads": 8,
    "multipliers": [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ],
}


def is_prime(number: int) -> bool:
    """Trial division."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def search_primes(start: int, layers: int, orders: int, heads: int) -> list[list[int]]:
    """The contract's words: restart from ``start`` for every order, take the smallest prime not yet used."""
    used: set[int] = set()
    result = []
    for _ in range(layers):
        row = []
        for _ in range(orders):
            candidate = start
            for _ in range(heads):
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
        result.append(row)
    return result


class Tables:
    """Primes, offsets and multipliers as nested lists."""

    def __init__(self, model: dict[str, Any] = MODEL) -> None:
        self.heads, self.orders = model["n_heads"], model["max_ngram"] - 1
        self.pad_token = model["pad_token_id"]
        self.multipliers = model["multipliers"]
        self.primes = search_primes(model["prime_search_start"], len(model["layer_ids"]), self.orders, self.heads)
        self.offsets = [[sum(row[:column]) for column in range(len(row))] for row in self.primes]


def hash_batch(tables: Tables, batch: Any, token_map: list[int], cache: dict[int, int] | None = None) -> list[Any]:
    """ids[token][layer][column] of a batch-like object; ``cache`` maps slot -> compressed id or DEAD."""
    count = len(batch.token_ids)
    if cache is not None:
        for token in range(count):
            if batch.slots[token] >= 0:
                value = DEAD if batch.dead[token] else token_map[batch.token_ids[token]]
                cache[int(batch.slots[token])] = int(value)
    return [_hash_token(tables, batch, token_map, cache, token) for token in range(count)]


def _hash_token(tables: Tables, batch: Any, token_map: list[int], cache: Any, token: int) -> list[list[int]]:
    pad = int(token_map[tables.pad_token])
    values: list[int] = []
    dead_seen = False
    for shift in range(tables.orders + 1):
        source = _source(batch, token_map, cache, (token, shift), pad)
        dead_seen = dead_seen or source is None
        values.append(pad if dead_seen else int(source))
    return [_columns(tables, layer, values) for layer in range(len(tables.primes))]


def _columns(tables: Tables, layer: int, values: list[int]) -> list[int]:
    row = []
    for order in range(2, tables.orders + 2):
        mixed = 0
        for shift in range(order):
            mixed ^= values[shift] * tables.multipliers[layer][shift]
        for head in range(tables.heads):
            column = (order - 2) * tables.heads + head
            row.append(mixed % tables.primes[layer][column] + tables.offsets[layer][column])
    return row


def _source(batch: Any, token_map: list[int], cache: Any, at: tuple[int, int], pad: int) -> int | None:
    """The compressed id ``shift`` tokens back; None where it is dead or before the sequence."""
    token, shift = at
    starts = [int(start) for start in batch.query_start_loc]
    request = 0
    while request < len(starts) - 2 and token >= starts[request + 1]:
        request += 1
    if batch.positions[token] - shift < 0:
        return None
    if token - shift >= starts[request]:
        return None if batch.dead[token - shift] else token_map[batch.token_ids[token - shift]]
    column = starts[request] - 1 - (token - shift)
    if column < len(batch.window[request]) and batch.window[request][column] >= 0:
        return None if batch.window_dead[request][column] else token_map[batch.window[request][column]]
    if cache is None:
        return pad
    position = int(batch.positions[token]) - shift
    block = int(batch.block_table[request][position // batch.block_size])
    value = cache.get(block * batch.block_size + position % batch.block_size, 0)
    return None if value == DEAD else value


def e4m3(code: int) -> float:
    """One FP8 e4m3 code as a Python float."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def bf16_bits(code: int, scale: int) -> int:
    """bf16 bits of value × scale: the product rounded to FP32, then to nearest even; NaN is 0x7FC0."""
    factor = struct.unpack("<f", struct.pack("<I", scale << 23))[0]
    product = e4m3(code) * factor  # exact in double precision
    if math.isnan(product):
        return 0x7FC0
    try:
        bits = struct.unpack("<I", struct.pack("<f", product))[0]
    except OverflowError:
        return 0xFF80 if product < 0 else 0x7F80
    high, low = bits >> 16, bits & 0xFFFF
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def decode_row(weight: bytes, scales: bytes, block: int = 32) -> list[int]:
    """One row's bf16 bits."""
    return [bf16_bits(code, scales[column // block]) for column, code in enumerate(weight)]


def token_map(compressed: int = 99_092, vocabulary: int = 129_280) -> list[int]:
    """The synthetic token map of the golden vectors: (id × 1,000,003 + 17) mod compressed."""
    return [(token * 1_000_003 + 17) % compressed for token in range(vocabulary)]


def bf16_value(bits: int) -> float:
    """The number that 16 bits of bf16 spell."""
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def engram_output(
    hidden: list[float], rows: list[float], wkv: list[list[float]], norms: list[list[float]], *, keep: bool
) -> list[float]:
    """One token: ``rows`` (all heads in a row) times ``wkv`` [len(rows)][2 D], key first, then the gate."""
    if not keep:
        return hidden
    dim = len(hidden)
    both = [
        math.fsum(row * weights[column] for row, weights in zip(rows, wkv, strict=True)) for column in range(2 * dim)
    ]
    key, value = both[:dim], both[dim:]
    rms = [math.sqrt(math.fsum(x * x for x in each) / dim + 1e-20) for each in (hidden, key)]
    products = (h * q * k * x for h, q, k, x in zip(hidden, *norms, key, strict=True))
    dot = math.fsum(products) / rms[0] / rms[1] / math.sqrt(dim)
    root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), -1.0 if dot < 0 else 1.0)
    return [h + v / (1 + math.exp(-root)) for h, v in zip(hidden, value, strict=True)]
