"""What each process of a two-rank vLLM storage does; loaded by path."""

from pathlib import Path

from pytest_engram.backends import load_backend
from pytest_engram.cases.storage import _Cudart

NBYTES = 33 * 4096


def share(group, payload):
    """Build, write and load the engine's own storage: what this rank saw, or the text of the engine's error."""
    backend, before = load_backend(payload["spec"]), set(Path("/dev/shm").glob("vllm_engram_*"))
    group.barrier(step="loaded")
    cudart = _Cudart(pins=group.rank != payload.get("unpinned"))
    try:
        table = backend.storage(group, NBYTES, cudart)
    except RuntimeError as error:
        return str(error)
    group.barrier(step="built")
    left = len(set(Path("/dev/shm").glob("vllm_engram_*")) - before)
    if group.rank == 1:
        table.buffer[-1] = 77
    group.barrier(step="written")
    shared = int(table.buffer[-1])
    group.barrier(step="read")
    table.load((lambda buffer: buffer.fill(3)) if group.rank == 0 else None, group)
    return [shared, int(table.buffer.sum(dtype="int64")), left]
