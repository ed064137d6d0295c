"""Which uncore counters a rank opens on which machine, what it makes of their counts, and why it has none."""

from __future__ import annotations

import gc
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.errors import NotMeasurable
from pytest_engram.numa import _syscalls, uncore
from pytest_engram.numa.tree import Tree
from pytest_engram.numa.uncore import KEY, Link, SocketLink

Unit = Mapping[str, str]
UPI: Unit = {"format/event": "config:0-7", "format/umask": "config:8-15,32-55"}
DF: Unit = {"format/event": "config:0-7,32-37", "format/umask": "config:8-15,24-27"}  # Zen 4 and later
OLD_DF: Unit = {"format/event": "config:0-7,32-35,59-60", "format/umask": "config:8-15"}
GRACE: Unit = {
    "format/event": "config:0-32", "format/port": "config1:0-1", "format/root_port": "config1:0-9",
    "events/rd_bytes_rem": "event=0x1",
}  # fmt: skip
TWO = (0, 1, 0, 1, 0, 1)  # the socket of CPU 0, 1, 2 …: numbered by turns


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    """``machine(cpu, {unit: files}, sockets)`` → the tree of a machine; unit n has the type 40 + n."""

    def build(cpu: str, units: Mapping[str, Unit], sockets: Sequence[int] = TWO) -> Tree:
        vendor, _, numbers = cpu.partition("-")
        family, _, model = numbers.partition("-")
        lines = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n" if cpu else "CPU part\t: 0xd4f\n"
        files = {"proc/cpuinfo": f"processor\t: 0\n{lines}", "sys/devices/system/cpu/online": f"0-{len(sockets) - 1}"}
        files["proc/sys/kernel/perf_event_paranoid"] = "2\n"
        for number, socket in enumerate(sockets):
            files[f"sys/devices/system/cpu/cpu{number}/topology/physical_package_id"] = f"{socket}\n"
        for index, (unit, texts) in enumerate(units.items()):
            for name, text in {"type": str(40 + index), "cpumask": "0,1", **texts}.items():
                files[f"sys/bus/event_source/devices/{unit}/{name}"] = f"{text}\n"
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return Tree(tmp_path)

    return build


class Kernel:
    """Stands in for ``perf_event_open``: each counter is a pipe that gives the records fed to it."""

    def __init__(self, refuse_after: int | None = None, error: OSError | None = None) -> None:
        self.opened: list[tuple[int, ...]] = []
        self.ends: list[int] = []
        self.fds: list[int] = []
        self.refuse_after, self.error = refuse_after, error

    def __call__(self, *words: int) -> int:
        if len(self.opened) == self.refuse_after and self.error:
            raise self.error
        self.opened.append(words)
        reader, writer = os.pipe()
        self.ends.append(writer)
        self.fds.append(reader)
        os.write(writer, struct.pack("3Q", 100, 10, 10))
        return reader

    def feed(self, *records: tuple[int, int, int]) -> None:
        for writer, record in zip(self.ends, records, strict=True):
            os.write(writer, struct.pack("3Q", *record))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """The stand-in, in force."""
    stand_in = Kernel()
    monkeypatch.setattr(_syscalls, "perf_event_open", stand_in)
    yield stand_in
    for end in stand_in.ends:
        os.close(end)


def is_open(fd: int) -> bool:
    """Whether this process has the descriptor."""
    return os.path.exists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("model", [85, 106, 143, 207, 173])
def test_intel_counts_received_data_flits(machine: Any, kernel: Kernel, model: int) -> None:
    """Each UPI unit counts RxL data flits on its CPU of the rank's socket, which need not be one of the rank's."""
    tree = machine(f"GenuineIntel-6-{model}", {"uncore_upi_0": UPI, "uncore_upi_1": UPI, "uncore_imc_0": UPI})
    for cpus, cpu in (((2, 4), 0), ((3, 5), 1)):
        kernel.opened.clear()
        SocketLink(cpus, tree).close()
        assert kernel.opened == [(40, 0xF03, 0, cpu), (41, 0xF03, 0, cpu)]


@pytest.mark.parametrize(
    ("cpu", "unit", "first", "last", "count", "home"),
    [
        ("AuthenticAMD-26-2", DF, 0xD0F003F5F, 0xE0F003F9F, 6, 0),  # Zen 5 has inbound events
        ("AuthenticAMD-26-17", DF, 0xD0F003F5F, 0xE0F003F9F, 6, 0),
        ("AuthenticAMD-25-17", DF, 0xB0F003E5F, 0xD0F003E1F, 8, 1),  # Zen 4: what leaves the other socket
        ("AuthenticAMD-25-160", DF, 0xB0F003E5F, 0xD0F003E1F, 8, 1),
        ("AuthenticAMD-25-1", OLD_DF, 0x7000002C7, 0x800000287, 4, 1),  # Zen 3
        ("AuthenticAMD-23-49", OLD_DF, 0x7000002C7, 0x800000287, 4, 1),  # Zen 2
    ],
)
def test_amd_counts_link_beats(
    machine: Any, kernel: Kernel, cpu: str, unit: Unit, first: int, last: int, count: int, home: int
) -> None:
    """Each generation's events land in the bits that the format files name, on the socket that has the direction."""
    SocketLink((2,), machine(cpu, {"amd_df": unit})).close()
    assert (kernel.opened[0], kernel.opened[-1]) == ((40, first, 0, home), (40, last, 0, home))
    assert len(set(kernel.opened)) == count


def test_grace_counts_what_devices_read_from_remote_memory(machine: Any, kernel: Kernel) -> None:
    """The socket's own C2C and PCIe units count all ports' remote reads, in bytes; the key says whose they are."""
    names = [f"nvidia_{name}_pmu_{socket}" for name in ("nvlink_c2c0", "nvlink_c2c1", "pcie") for socket in (0, 1)]
    units = {name: {**GRACE, "cpumask": name[-1]} for name in (*names, "nvidia_scf_pmu_0", "nvidia_cnvlink_pmu_0")}
    link = SocketLink((1, 3), machine("", units))
    assert kernel.opened == [(41, 1, 3, 1), (43, 1, 3, 1), (45, 1, 0x3FF, 1)]
    kernel.feed((101, 11, 11), (120, 11, 11), (400, 11, 11))
    assert link.take() == {f"{KEY}_to_devices": 321.0}
    link.close()


@pytest.mark.parametrize(
    ("cpu", "units", "sockets", "cpus", "reason"),
    [
        ("GenuineIntel-6-143", {}, TWO, (0,), "a virtual machine hides them"),
        ("GenuineIntel-6-63", {"uncore_qpi_0": UPI}, TWO, (0,), "uncore_qpi_0: no known event"),
        ("AuthenticAMD-23-1", {"amd_df": OLD_DF}, TWO, (0,), "link on AuthenticAMD-23-1"),
        ("AuthenticAMD-26-80", {"amd_df": DF}, TWO, (0,), "link on AuthenticAMD-26-50"),
        ("", {"arm_cmn_0": GRACE}, TWO, (0,), "link on this CPU"),
        ("GenuineIntel-6-143", {"uncore_upi_0": UPI}, (0, 0), (0,), "on 1 of 1 sockets"),
        ("GenuineIntel-6-143", {"uncore_upi_0": UPI}, TWO, (0, 1), "on 2 of 2 sockets"),
        ("GenuineIntel-6-143", {"uncore_upi_0": UPI}, (-1, -1), (0,), "the socket of CPU 0 is unknown"),
        ("AuthenticAMD-25-17", {"amd_df": DF}, (0, 1, 2, 3), (0,), "on 1 of 4 sockets"),
        ("AuthenticAMD-25-17", {"amd_df": OLD_DF}, TWO, (0,), "amd_df cannot take umask=0xf3e"),
        ("GenuineIntel-6-143", {"uncore_upi_0": {**UPI, "cpumask": "1"}}, TWO, (0,), "counts this socket's link"),
        ("GenuineIntel-6-143", {"uncore_upi_0": {}}, TWO, (0,), "uncore_upi_0/format/event is absent"),
        ("", {"nvidia_pcie_pmu_0": {"cpumask": "0"}}, TWO, (0,), "events/rd_bytes_rem is absent"),
        ("GenuineIntel-6-143", {"uncore_upi_0": {**UPI, "cpumask": "a"}}, TWO, (0,), "cpumask: 'a'"),
    ],
)  # fmt: skip
def test_no_counter_has_a_reason(
    machine: Any, kernel: Kernel, cpu: str, units: Any, sockets: Sequence[int], cpus: Sequence[int], reason: str
) -> None:
    """What is not there, not known or not one link is told and nothing is opened; never an exception out of a run."""
    taken = SocketLink(cpus, machine(cpu, units, sockets)).take()
    assert (list(taken), reason in str(taken[KEY]), kernel.opened) == ([KEY], True, []), taken


def test_many_sockets_are_fine_where_the_own_one_counts(machine: Any, kernel: Kernel) -> None:
    """Negative control of the four-socket refusal: received flits need no two-socket machine."""
    SocketLink((2,), machine("GenuineIntel-6-143", {"uncore_upi_0": {**UPI, "cpumask": "0-3"}}, (0, 1, 2, 3))).close()
    assert kernel.opened == [(40, 0xF03, 0, 2)]


def test_counts_since_the_last_take_are_scaled(machine: Any, kernel: Kernel) -> None:
    """Units add up; one that counted half of the time counts twice; nothing counted is 0, not absent."""
    link = SocketLink((0,), machine("GenuineIntel-6-143", {"uncore_upi_0": UPI, "uncore_upi_1": UPI}))
    kernel.feed((190, 30, 20), (109, 20, 20))
    assert link.take() == {KEY: pytest.approx((180 + 9) * 64 / 9)}
    kernel.feed((190, 40, 30), (109, 40, 40))
    assert link.take() == {KEY: 0.0}
    kernel.feed((190, 50, 40), (109, 50, 40))
    assert link.take() == {KEY: "uncore_upi_1 did not count: others hold its counters"}
    for end in kernel.ends:
        os.close(end)
    kernel.ends.clear()
    assert "unpack" in str(link.take()[KEY])  # the end of the file: the kernel gave the counter up
    link.close()
    assert link.take() == {KEY: "its counters are closed"}
    assert not any(map(is_open, kernel.fds))


@pytest.mark.parametrize(("number", "way_out"), [(13, "CAP_PERFMON"), (1, "CAP_PERFMON"), (19, None)])
def test_a_refusal_names_the_way_out(
    machine: Any, kernel: Kernel, number: int, way_out: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EACCES and EPERM say what they need; any other error only itself; counters that were open already are closed."""
    kernel.refuse_after, kernel.error = 1, OSError(number, "perf_event_open: no")
    tree = machine("GenuineIntel-6-143", {"uncore_upi_0": UPI, "uncore_upi_1": UPI})
    link = SocketLink((0,), tree)
    reason = str(link.take()[KEY])
    assert ("perf_event_open: no" in reason, "CAP_PERFMON" in reason) == (True, way_out is not None)
    assert (len(kernel.fds), is_open(kernel.fds[0])) == (1, False)
    assert uncore.describe(tree).startswith(f"bytes that arrive ({KEY}) by uncore_upi_0, uncore_upi_1;")
    monkeypatch.setattr(tree, "live", True)  # the live machine is asked
    kernel.refuse_after = len(kernel.opened)
    with pytest.raises(NotMeasurable, match="perf_event_open: no"):
        uncore.describe(tree)


def test_a_live_machine_is_asked_and_left(machine: Any, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor opens what a rank would open, and gives it back."""
    tree = machine("GenuineIntel-6-143", {"uncore_upi_0": UPI})
    monkeypatch.setattr(tree, "live", True)
    assert uncore.describe(tree).endswith("by uncore_upi_0; perf_event_paranoid 2")
    assert (len(kernel.fds), is_open(kernel.fds[0])) == (1, False)


def test_a_real_counter(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own CPU clock, a software event, goes the same way: opened, read twice, closed."""
    try:
        os.close(_syscalls.perf_event_open(1, 0, 0, 0))
    except OSError as refused:
        pytest.skip(f"this machine lets nobody count: {refused}")
    row = Link("GenuineIntel-6-8F", r"uncore_upi_\d", ("event=0x0",), 2)
    monkeypatch.setattr(uncore, "LINKS", (row,))
    tree = machine("GenuineIntel-6-143", {"uncore_upi_0": {**UPI, "type": "1", "cpumask": "0"}})
    gc.collect()  # what an earlier test left closes its descriptors now
    before = len(os.listdir("/proc/self/fd"))
    start = time.perf_counter()
    link = SocketLink((0,), tree)
    link.take()
    time.sleep(0.02)
    taken = link.take()[KEY]
    assert isinstance(taken, float)
    assert 2 * 0.02e9 <= taken <= 2e9 * (time.perf_counter() - start + 1)  # both clocks' own pace
    link.close()
    monkeypatch.setattr(uncore, "LINKS", (row._replace(events=("event=0xfe",)),))
    assert "perf_event_open: E" in str(SocketLink((0,), tree).take()[KEY])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("name", "text"), [("events/rd_bytes_rem", "event=?"), ("type", "none")])
def test_text_that_no_kernel_wrote_yet_is_an_absence(machine: Any, kernel: Kernel, name: str, text: str) -> None:
    """An event or a type that is no number opens nothing and raises nothing: the reason quotes it."""
    good = {**GRACE, "cpumask": "0"}
    with closing(SocketLink((0,), machine("", {"nvidia_nvlink_c2c0_pmu_0": good}))) as link:
        assert (link.absent, len(kernel.opened)) == (None, 1)
    link = SocketLink((0,), machine("", {"nvidia_nvlink_c2c0_pmu_0": {**good, name: text}}))
    assert len(kernel.opened) == 1
    assert text.rpartition("=")[2] in str(link.take()[KEY])
