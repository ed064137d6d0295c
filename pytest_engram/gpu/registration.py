"""Host memory registered with CUDA: every code checked, every piece unregistered exactly once.

Unregistering while a device view lives would leave a kernel with a dangling pointer, so it waits for the last view
(contract S5).  Host views cannot be counted, but each of them keeps the numpy owner alive, whose death unregisters.
"""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_engram.errors import EngramError, NotMeasurable, UsageError

CHUNK_BYTES = 256 << 30  # one call for 512 GiB or more fails on recent drivers
_PAGE = 4096
_CODES = {
    1: "registration-refused",  # cudaErrorInvalidValue
    2: "out-of-memory",  # cudaErrorMemoryAllocation
    35: "no-driver",  # cudaErrorInsufficientDriver
    100: "no-gpu",  # cudaErrorNoDevice
    712: "already-registered",  # cudaErrorHostMemoryAlreadyRegistered
    801: "registration-unsupported",  # cudaErrorNotSupported
}
_ABSENT = {"no-driver", "no-gpu", "registration-unsupported", "wsl-pinned-memory"}
_ACTIVE: weakref.WeakSet[HostRegistration] = weakref.WeakSet()


class Cudart:
    """The few calls that a registration needs, over torch; codes are cudaError_t numbers, 0 is success.

    They speak of the device that was current when it was made: a finalizer runs in whichever thread, whose device is 0.
    """

    def __init__(self) -> None:
        import torch

        cuda: Any = torch.cuda
        cuda.init()
        self._torch, self._cudart, self._device = torch, cuda.cudart(), f"cuda:{cuda.current_device()}"

    def register(self, address: int, nbytes: int) -> int:
        """``cudaHostRegister`` with flags 0."""
        return int(self._cudart.cudaHostRegister(address, nbytes, 0).value)

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        return int(self._cudart.cudaHostUnregister(address).value)

    def text(self, code: int) -> str:
        """``cudaGetErrorString``."""
        return str(self._cudart.cudaGetErrorString(self._cudart.cudaError(code)))

    def clear(self) -> None:
        """Take the pending error, so that no later launch is blamed for it."""
        with suppress(RuntimeError):  # torch binds no cudaGetLastError, but calls it behind every launch of its own
            self._torch.ones(1, device=self._device)

    def pinned(self, byte: Any) -> bool:
        """Whether CUDA knows this one-byte numpy view as pinned."""
        return bool(self._torch.from_numpy(byte).is_pinned())

    def pointer(self, address: int) -> int:
        """``cudaHostGetDevicePointer``; torch does not bind it, so its driver twin is called."""
        self.synchronize()  # makes torch's context current on this thread
        found, library = ctypes.c_uint64(), ctypes.CDLL("libcuda.so.1")
        code = library.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
        if code:
            raise EngramError(f"CUresult {code}", code="not-registered", who="cuMemHostGetDevicePointer")
        return int(found.value)

    def synchronize(self) -> None:
        """Wait until no kernel reads the range any more."""
        self._torch.cuda.synchronize(self._device)


class HeldCudart(Cudart):
    """Stands in where others registered the memory, or CUDA made it: what remains is to verify it."""

    def register(self, address: int, nbytes: int) -> int:  # noqa: ARG002 - CUDA's signature
        """It is registered."""
        return 0

    def unregister(self, address: int) -> int:  # noqa: ARG002
        """Whoever registered it undoes it."""
        return 0


class HostRegistration:
    """The registration of one contiguous u8 numpy range; made by :func:`register`."""

    def __init__(self, buffer: Any, cudart: Cudart, chunk_bytes: int) -> None:
        self.address, self.nbytes = int(buffer.ctypes.data), int(buffer.nbytes)
        self._cudart, self._closing, self._views = cudart, False, 0
        self._chunks: list[int] = []
        try:
            self._register(chunk_bytes)
            self._verify(buffer)
        except BaseException:
            self._unregister()
            raise
        owner = _owner(buffer)
        # The base rides along: the mapping may go only after the registration.
        self._gone = weakref.finalize(owner, self._owner_gone, owner.base)
        self._gone.atexit = False  # the process's end releases everything; CUDA may be gone by then
        _ACTIVE.add(self)

    @property
    def active(self) -> bool:
        """Whether any piece is still registered."""
        return bool(self._chunks)

    def pointer(self, address: int) -> int:
        """Under which address the GPU reads a registered byte."""
        return self._cudart.pointer(address)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether the whole range is registered by this object."""
        return self.active and self.address <= address and address + nbytes <= self.address + self.nbytes

    def hold(self, view: Any) -> None:
        """Count ``view`` as living: the range stays registered until it is gone."""
        if self._closing or not self.active:
            raise EngramError("the registration is closed", code="registration-closed", who="cudaHostRegister")
        self._views += 1
        weakref.finalize(view, self._release).atexit = False

    def close(self) -> None:
        """Unregister now, or when the last device view dies; a second call does nothing."""
        self._closing = True
        self._settle()

    def _release(self) -> None:
        self._views -= 1
        if self._closing:
            _warn_only(self._settle)

    def _settle(self) -> None:
        if self._views == 0 and self.active:
            self._end()
            self._gone.detach()

    def _owner_gone(self, _base: Any) -> None:
        self._closing = True
        if self.active:
            _warn_only(self._end)

    def _end(self) -> None:
        self._cudart.synchronize()  # a kernel may still read the range
        self._raise(self._unregister(), "cudaHostUnregister")

    def _register(self, chunk_bytes: int) -> None:
        chunk = max(_PAGE, chunk_bytes // _PAGE * _PAGE)
        for offset in range(0, self.nbytes, chunk):
            code = self._cudart.register(self.address + offset, min(chunk, self.nbytes - offset))
            self._raise(code, "cudaHostRegister", f"bytes from {offset} of {self.nbytes}")
            self._chunks.append(self.address + offset)

    def _verify(self, buffer: Any) -> None:
        """Every chunk's first byte and the last byte of all: an unknown page would be copied silently (S2)."""
        flat = buffer.reshape(-1)
        for offset in (*(address - self.address for address in self._chunks), self.nbytes - 1):
            if not self._cudart.pinned(flat[offset : offset + 1]):
                raise EngramError(
                    f"byte {offset} is not known as pinned after registration", code="not-pinned",
                    who="cudaHostRegister", way_out="without it a device view would be a private copy",
                )  # fmt: skip

    def _unregister(self) -> int:
        """Unregister every chunk once, whatever the others answer; the first code that is no success, else 0."""
        chunks, self._chunks = self._chunks, []
        codes = [self._cudart.unregister(address) for address in reversed(chunks)]
        return next((code for code in codes if code), 0)

    def _raise(self, number: int, call: str, where: str = "") -> None:
        if not number:
            return
        self._cudart.clear()
        code, text = _CODES.get(number, "registration-refused"), self._cudart.text(number)
        if code in {"out-of-memory", "registration-refused", "registration-unsupported"} and _wsl():
            code, text = "wsl-pinned-memory", f"{text} (WSL limits pinned memory)"
        kind = NotMeasurable if code in _ABSENT else EngramError
        where = where or f"{self.nbytes} bytes at {self.address:#x}"
        raise kind(f"{text} (cudaError {number})", code=code, who=call, where=where, expected="cudaSuccess")


def register(buffer: Any, *, cudart: Cudart | None = None, chunk_bytes: int = CHUNK_BYTES) -> HostRegistration:
    """Register the bytes of ``buffer``, a contiguous, writable u8 numpy array, for direct reads by the GPU.

    Untouched pages are faulted here, under this task's memory policy: touch them first.

    Raises:
        NotMeasurable: no GPU, no driver, a CPU-only torch, WSL's limit on pinned memory.
        EngramError: ``registration-refused``, ``out-of-memory``, ``already-registered``, ``not-pinned``; every
            piece that was registered before the failure is unregistered again.
    """
    if str(buffer.dtype) != "uint8" or not buffer.flags.c_contiguous or not buffer.flags.writeable or not buffer.nbytes:
        raise UsageError(
            f"{buffer.dtype} {buffer.shape}", code="bad-buffer", who="cudaHostRegister",
            expected="a writable, contiguous, non-empty u8 array",
        )  # fmt: skip
    if cudart is None:
        require()
        cudart = Cudart()
    return HostRegistration(buffer, cudart, chunk_bytes)


def covering(address: int, nbytes: int) -> HostRegistration | None:
    """The living registration that holds the whole range, if any."""
    return next((one for one in list(_ACTIVE) if one.covers(address, nbytes)), None)


def require() -> None:
    """Raise ``NotMeasurable`` with the code and the reason of :func:`unavailable`."""
    if absent := _absence():
        code, seen, way_out = absent
        raise NotMeasurable(seen, code=code, who="CUDA", way_out=way_out)


def unavailable() -> str | None:
    """Why this process cannot use a GPU, in one sentence, or None; creates no CUDA context."""
    absent = _absence()
    return None if absent is None else f"{absent[0]}: {absent[1]} ({absent[2]})"


def _absence() -> tuple[str, str, str] | None:
    try:
        import torch
    except ImportError as error:
        return "no-torch", f"torch cannot be imported: {error}", "install pytest-engram[gpu]"
    if torch.version.cuda is None:
        return "cpu-only-torch", f"torch {torch.__version__} is built without CUDA", "install a CUDA build of torch"
    if torch.cuda.device_count() > 0:  # NVML where it can: no context
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return "no-gpu", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it"
    if not os.path.exists("/proc/driver/nvidia/version") and not _wsl():
        return "no-driver", "the NVIDIA driver is not loaded", "install the driver, or pass the GPU to the container"
    return "no-gpu", "the driver shows no GPU", "pass the GPU to the container"


def _wsl() -> bool:
    with suppress(OSError):
        return "microsoft" in Path("/proc/sys/kernel/osrelease").read_text("ascii", "replace").lower()
    return False


def _owner(buffer: Any) -> Any:
    """The ndarray that every view of this memory keeps alive: the last array on the way down to the mapping."""
    while isinstance(buffer.base, type(buffer)):
        buffer = buffer.base
    return buffer


def _warn_only(action: Any) -> None:
    """Finalizers cannot raise to anybody; a warning is the loudest that they can be."""
    try:
        action()
    except EngramError as error:
        warnings.warn(str(error), ResourceWarning, stacklevel=2)
