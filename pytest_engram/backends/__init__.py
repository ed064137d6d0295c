"""Systems under test, found by entry point or import path."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pytest_engram.backends.protocol import CAPABILITIES, Backend
from pytest_engram.errors import EngramError, UsageError

GROUP = "pytest_engram.backends"
_MEMBERS = ("name", "engines", "capabilities", "differences", "receipt")
_METHODS = {"hash": "hasher", "slot-cache": "hasher", "lookup": "lookup", "shards": "lookup", "gate": "gate"}
_BUILT_IN = {  # also from an uninstalled checkout
    "reference": "pytest_engram.backends.reference:ReferenceBackend",
    "vllm": "pytest_engram.backends.vllm:VllmBackend",
}


def known_backends() -> dict[str, str]:
    """Name -> import path of every installed backend."""
    return {**_BUILT_IN, **{point.name: point.value for point in entry_points(group=GROUP)}}


def load_backend(spec: str) -> Backend:
    """The backend named ``spec``: an entry point of group ``pytest_engram.backends``, or ``pkg.mod:Class``.

    ``name@target`` (``vllm@0.33.0``, ``vllm@/path/to/checkout``) hands the whole spec to an entry point's class.

    Raises ``UsageError`` that names the known backends when there is none, when its import or constructor fails, or
    when it does not satisfy the protocol.
    """
    name, _, target = spec.partition("@")
    path = known_backends().get(name, spec)
    if ":" not in path:
        raise _bad(spec, "no such backend", "unknown-backend")
    try:
        kind = EntryPoint(name=name, value=path, group=GROUP).load()
        backend = kind(spec) if target else kind()
    except EngramError:
        raise
    except Exception as error:
        raise _bad(spec, f"{type(error).__name__}: {error}", "backend-import") from error
    return _checked(spec, backend)


def _checked(spec: str, backend: Any) -> Backend:
    """Refuse what does not satisfy the protocol in what it declares, naming what is missing; nothing is called."""
    offered = getattr(backend, "capabilities", ())
    wanted = [*_MEMBERS, *(method for capability, method in _METHODS.items() if capability in offered)]
    if missing := [name for name in wanted if not hasattr(backend, name)]:
        raise _bad(spec, f"{type(backend).__name__} lacks {', '.join(missing)}", "backend-protocol")
    if not backend.engines <= {"cpu", "cuda"} or not backend.engines:
        raise _bad(spec, f"engines {sorted(backend.engines)}", "backend-protocol")
    if unknown := backend.capabilities - set(CAPABILITIES):
        raise _bad(spec, f"unknown capabilities {sorted(unknown)}", "backend-protocol")
    return backend  # type: ignore[no-any-return]


def _bad(spec: str, seen: str, code: str) -> UsageError:
    return UsageError(
        seen, code=code, who=f"backend {spec!r}",
        expected=f"engines of cpu and cuda, capabilities of {', '.join(CAPABILITIES)}"
        if code == "backend-protocol" else f"one of {', '.join(sorted(known_backends()))}, or pkg.mod:Class",
        way_out="see pytest_engram/backends/protocol.py" if code == "backend-protocol"
        else "install the backend's distribution or correct the import path",
    )  # fmt: skip


def receipt_of(backend: Backend) -> dict[str, str]:
    """The backend's own receipt, and the hash of its classes' source: two names for one behaviour show as one code."""
    sources = hashlib.sha256()
    for kind in type(backend).__mro__[:-1]:
        with contextlib.suppress(OSError, TypeError):  # a class without a file is in the receipt by its version only
            sources.update(inspect.getsource(kind).encode())
    # As text: torch's version is of a type that no codec takes.
    return {**{key: str(value) for key, value in backend.receipt().items()}, "code": sources.hexdigest()}
