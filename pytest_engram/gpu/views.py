"""Device views of registered host memory: the same bytes under the GPU's address, never a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_engram.errors import EngramError, UsageError
from pytest_engram.gpu.registration import covering


class HostView:
    """What torch sees of a registered u8 array; holds the array, thereby its owner, thereby the registration."""

    def __init__(self, array: Any, pointer: int) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def device_view(
    array: Any, *, pointer: Callable[[int], int] | None = None, tensor: Callable[[HostView], Any] | None = None
) -> Any:
    """A torch u8 tensor on the GPU over the memory of ``array``, contiguous u8 numpy of any shape, zero-copy.

    The memory stays registered while the tensor, or any view of it, lives.  ``pointer`` (host address to device
    address) and ``tensor`` (view to tensor) are CUDA's own unless a test replaces them.

    Raises:
        UsageError: not u8, not contiguous, empty.
        EngramError: ``not-registered`` outside every living registration; ``view-split`` where the pieces of a
            registration have no common device range; ``private-copy`` if torch copied the data.
    """
    if str(array.dtype) != "uint8" or not array.flags.c_contiguous or not array.nbytes:
        seen = f"{array.dtype} {array.shape}"
        raise UsageError(seen, code="bad-buffer", who="device view", expected="a contiguous u8 array")
    address, nbytes = int(array.ctypes.data), int(array.nbytes)
    registration = covering(address, nbytes)
    if registration is None:
        raise _refused("not-registered", f"{nbytes} bytes at {address:#x}", "a range inside one registration")
    find = pointer or registration.pointer
    first = find(address)
    if find(address + nbytes - 1) - first != nbytes - 1:
        raise _refused("view-split", "the pieces' device addresses", "one contiguous device range")
    view = HostView(array, first)
    registration.hold(view)
    result = (tensor or _tensor)(view)
    if int(result.data_ptr()) != first:
        raise _refused("private-copy", f"data at {int(result.data_ptr()):#x}", f"a view at {first:#x}")
    return result


def _refused(code: str, seen: str, expected: str) -> EngramError:
    return EngramError(seen, code=code, who="device view", expected=expected)


def _tensor(view: HostView) -> Any:
    import torch

    cuda: Any = torch.cuda
    # With a number torch takes the device from here; without one from the pointer, which knows none of cuMem memory.
    return torch.as_tensor(view, device=f"cuda:{cuda.current_device()}")
