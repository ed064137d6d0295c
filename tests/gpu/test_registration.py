"""Registration bookkeeping against a stand-in cudart, device views, and the reasons why there is no GPU."""

from __future__ import annotations

import gc
import mmap
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.gpu import registration
from pytest_engram.gpu.registration import covering, register, require, unavailable
from pytest_engram.gpu.views import device_view

PAGES = 10


def buffer() -> Any:
    """An anonymous mapping of ten pages as u8."""
    return np.frombuffer(mmap.mmap(-1, PAGES * 4096), dtype=np.uint8)


class HostTwin:
    """Lets numpy take a device view for host memory; like torch's tensor, the result keeps the view alive."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.__array_interface__ = held.__cuda_array_interface__


def view(array: Any) -> Any:
    """A device view whose device is the host."""
    torch = pytest.importorskip("torch")
    return device_view(array, pointer=lambda at: at, tensor=lambda v: torch.from_numpy(np.asarray(HostTwin(v))))


def test_one_call_registers_and_close_unregisters_once(make_cudart: Any) -> None:
    """S5: a second close does nothing."""
    cudart, array = make_cudart(), buffer()
    held = register(array, cudart=cudart)
    assert cudart.ranges == {array.ctypes.data: PAGES * 4096}
    held.close()
    held.close()
    assert cudart.count("unregister") == 1
    assert not held.active
    del array
    gc.collect()
    assert cudart.count("unregister") == 1


def test_a_large_range_is_registered_in_pieces(make_cudart: Any) -> None:
    """Pieces are whole pages, cover every byte once, and all go at close."""
    cudart, array = make_cudart(), buffer()
    held = register(array, cudart=cudart, chunk_bytes=4 * 4096 + 17)
    assert [size // 4096 for size in cudart.ranges.values()] == [4, 4, 2]
    assert held.covers(array.ctypes.data, array.nbytes)
    held.close()
    assert cudart.ranges == {}
    assert cudart.count("synchronize") == 1


@pytest.mark.parametrize(
    ("number", "code", "kind"),
    [
        (1, "registration-refused", EngramError),
        (2, "out-of-memory", EngramError),
        (712, "already-registered", EngramError),
        (999, "registration-refused", EngramError),
        (100, "no-gpu", NotMeasurable),
        (35, "no-driver", NotMeasurable),
        (801, "registration-unsupported", NotMeasurable),
    ],
)
def test_a_refused_piece_undoes_the_others(make_cudart: Any, number: int, code: str, kind: type[EngramError]) -> None:
    """S3: every successful registration is undone, the pending error is taken, the code says why."""
    cudart = make_cudart(fail_at=2, code=number)
    with pytest.raises(kind, match=f"text of {number}") as caught:
        register(buffer(), cudart=cudart, chunk_bytes=4096)
    assert caught.value.code == code
    assert type(caught.value) is kind
    assert cudart.ranges == {}
    assert cudart.count("unregister") == 2
    assert ("clear", number) in cudart.calls
    assert cudart.pending == 0


def test_wsl_is_named(make_cudart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K37: WSL limits pinned memory; the reason says so instead of a bare code."""
    monkeypatch.setattr(registration, "_wsl", lambda: True)
    with pytest.raises(NotMeasurable, match="WSL limits pinned memory") as caught:
        register(buffer(), cudart=make_cudart(fail_at=0, code=2))
    assert caught.value.code == "wsl-pinned-memory"


def test_memory_that_is_not_pinned_afterwards_is_an_error(make_cudart: Any) -> None:
    """S2: a mapping that CUDA does not know would be copied silently."""
    cudart = make_cudart(pinned=False)
    with pytest.raises(EngramError, match="not known as pinned") as caught:
        register(buffer(), cudart=cudart)
    assert caught.value.code == "not-pinned"
    assert cudart.ranges == {}


def test_the_last_host_view_unregisters_before_the_unmap(make_cudart: Any) -> None:
    """S5: dropping the array, then a slice of a slice, unregisters exactly once, while the mapping still stands."""
    cudart, mapping = make_cudart(), mmap.mmap(-1, PAGES * 4096)
    array = np.frombuffer(mapping, dtype=np.uint8)
    held = register(array[:-1][1:], cudart=cudart)
    part = array[4096:8192][:100]
    del array
    gc.collect()
    assert cudart.count("unregister") == 0
    del part
    gc.collect()
    assert cudart.count("unregister") == 1
    assert not held.active
    mapping.close()  # a living export would refuse


def test_the_mapping_outlives_the_registration(make_cudart: Any) -> None:
    """S5: when the owner dies the base is still mapped at the moment of unregistering."""
    seen: list[int] = []
    array = buffer()
    address = array.ctypes.data

    class Watching(make_cudart):  # type: ignore[misc]
        def unregister(self, address: int) -> int:
            with open("/proc/self/maps", encoding="ascii") as maps:
                spans = [line.split()[0].split("-") for line in maps]
            seen.append(sum(int(low, 16) <= address < int(high, 16) for low, high in spans))
            return int(super().unregister(address))

    register(array, cudart=Watching())
    del array
    gc.collect()
    assert seen == [1]
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert not any(int(line.partition("-")[0], 16) == address for line in maps)


def test_close_waits_for_the_last_device_view(make_cudart: Any) -> None:
    """S5: unregistering while device views live is deferred; the last one ends it, once."""
    cudart, array = make_cudart(), buffer()
    held = register(array, cudart=cudart)
    first, second = view(array[:4096]), view(array[4096:8192].reshape(16, 256))
    child = first[3:]
    held.close()
    del first
    gc.collect()
    assert held.active
    del second
    gc.collect()
    assert cudart.count("unregister") == 0
    del child
    gc.collect()
    assert cudart.count("unregister") == 1


def test_no_view_of_a_closed_registration(make_cudart: Any) -> None:
    """A range that is about to be unregistered takes no new view."""
    array = buffer()
    held = register(array, cudart=make_cudart())
    first = view(array)
    held.close()
    with pytest.raises(EngramError, match="closed"):
        view(array)
    assert first[0] == 0


def test_a_failing_unregister_is_loud(make_cudart: Any) -> None:
    """close raises with the call's name; a finalizer, which nobody hears, warns."""
    held = register(array := buffer(), cudart=make_cudart(unregister_code=1))
    with pytest.raises(EngramError, match=r"cudaHostUnregister.*text of 1"):
        held.close()
    other = buffer()
    register(other, cudart=make_cudart(unregister_code=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del other
        gc.collect()
    assert ["cudaHostUnregister" in str(w.message) for w in caught] == [True]
    assert array[0] == 0


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(4, np.float32),
        np.zeros((4, 4), np.uint8)[:, ::2],
        np.zeros(0, np.uint8),
        np.frombuffer(b"ab", np.uint8),
    ],
)
def test_only_plain_bytes_are_registered(make_cudart: Any, bad: Any) -> None:
    """Wrong dtype, strided, empty and read-only arrays are refused before CUDA is asked."""
    cudart = make_cudart()
    with pytest.raises(UsageError) as caught:
        register(bad, cudart=cudart)
    assert caught.value.code == "bad-buffer"
    assert cudart.calls == []


def test_a_view_lies_inside_one_registration(make_cudart: Any) -> None:
    """A range that no living registration covers is refused; after the owner died nothing covers it."""
    array = buffer()
    held = register(array[: 4 * 4096], cudart=make_cudart())
    assert covering(array.ctypes.data, 4096) is held
    with pytest.raises(EngramError) as caught:
        view(array[4095 * 4 : 5 * 4096])
    assert caught.value.code == "not-registered"
    held.close()
    assert covering(array.ctypes.data, 4096) is None


def test_a_view_shares_memory_and_a_copy_is_found(make_cudart: Any) -> None:
    """Zero-copy: a host write is seen through the view; a torch that copied is refused (S2)."""
    torch = pytest.importorskip("torch")
    array = buffer()
    held = register(array, cudart=make_cudart())
    seen = view(array.reshape(-1, 256))
    array[257] = 9
    assert seen.shape == (160, 256)
    assert int(seen[1, 1]) == 9
    with pytest.raises(EngramError) as caught:
        device_view(array, pointer=lambda at: at, tensor=lambda v: torch.from_numpy(v.array.copy()))
    assert caught.value.code == "private-copy"
    with pytest.raises(EngramError) as caught:
        device_view(array, pointer=lambda at: at if at == array.ctypes.data else at + 4096)
    assert caught.value.code == "view-split"
    assert held.active


def test_a_registration_speaks_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread lets go of a range, the device that may still read it is waited for, and no other is woken."""
    asked: list[Any] = []
    cuda = SimpleNamespace(
        init=lambda: None, cudart=lambda: None, current_device=lambda: 1, synchronize=lambda *on: asked.append(on)
    )
    torch = SimpleNamespace(cuda=cuda, ones=lambda _count, device: asked.append(device))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for kind in (registration.Cudart, registration.HeldCudart):
        held = kind()
        cuda.current_device = lambda: 0  # another thread's
        held.synchronize()
        held.clear()
        cuda.current_device = lambda: 1
    assert asked == [("cuda:1",), "cuda:1"] * 2


def fake_torch(cuda: str | None, devices: int = 0) -> Any:
    """A torch of which only the probe's questions are answered."""
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda), __version__="9.9", cuda=SimpleNamespace(device_count=lambda: devices)
    )


@pytest.mark.parametrize(
    ("torch", "visible", "driver", "code"),
    [
        (None, None, 1, "no-torch"),
        (fake_torch(None), None, 1, "cpu-only-torch"),
        (fake_torch("13.0"), "", 1, "no-gpu: CUDA_VISIBLE_DEVICES"),
        (fake_torch("13.0"), None, 0, "no-driver"),
        (fake_torch("13.0"), None, 1, "no-gpu: the driver shows"),
    ],
)
def test_every_absence_has_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    torch: Any,
    visible: str | None,
    driver: int,
    code: str,
) -> None:
    """No torch, a CPU build, hidden GPUs, no driver, no GPU: each is named, none is an import traceback."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("os.path.exists", lambda _path: bool(driver))
    reason = unavailable()
    assert reason is not None
    assert reason.startswith(code)
    with pytest.raises(NotMeasurable) as caught:
        require()
    assert caught.value.code == code.partition(":")[0]
    with pytest.raises(NotMeasurable):
        register(buffer())


def test_a_gpu_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe answers None where a CUDA build sees a device, and asks nothing that would need a context."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch("13.0", devices=1))
    assert unavailable() is None
    require()
