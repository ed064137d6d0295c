"""Bytes that arrive at a rank's socket over the link between sockets, by the kernel's uncore counters.

One direction: what is read from the other socket's memory arrives.  Pages that move from node 0 to node 1 take arriving
bytes from rank 1 and give them to rank 0; a sum over the machine would stay.  The counters are the socket's, not the
rank's: another rank on it, another process and the coherence protocol's own data count too.  Pages on another node of
the same socket (sub-NUMA clustering) cross no link.  Never compared with known traffic on two sockets by us.

Sources of ``LINKS``, all of linux: ``tools/perf/pmu-events/arch/x86``, its ``mapfile.csv`` for the CPUs and there
{skylakex,icelakex,sapphirerapids,emeraldrapids,graniterapids}/uncore-interconnect.json ``UNC_UPI_RxL_FLITS.ALL_DATA``
(× 64/9 bytes: ``upi_data_receive_bw`` in skylakex/skx-metrics.json), amdzen5/data-fabric.json
``local_socket_inbound_data_beats_link_*`` (64 bytes), amdzen4 ``local_socket_outbound_data_beats_link*`` (64 bytes) and
amdzen2, amdzen3 ``remote_outbound_data_controller_*`` (32 bytes), which have no inbound event: there the other socket's
outbound data is counted.  Grace: ``drivers/perf/arm_cspmu/nvidia_cspmu.c`` and
``Documentation/admin-guide/perf/nvidia-tegra241-pmu.rst``: what this socket's GPUs and PCIe devices read from remote
memory, on all ports (older kernels count none unless they are named).  What its CPUs read (``nvidia_scf_pmu``) is left
out: no kernel source gives the size of a beat.  Every other CPU is absent, with that reason.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.numa import _syscalls
from pytest_engram.numa.topology import read_sockets
from pytest_engram.numa.tree import Tree, parse_list

KEY = "cross_socket_in_bytes"  # hypothesis 1 reads every key that begins with ``cross_socket``
_UNITS, _ONLINE = "sys/bus/event_source/devices", "sys/devices/system/cpu/online"
_KIN = r"(uncore_(upi|qpi|imc)|amd_(df|umc)|arm_cmn|nvidia_(scf|pcie|cnvlink|nvlink_c2c\d)_pmu)(_\d+)*"
_DENIED = "needs CAP_PERFMON, and seccomp to allow perf_event_open; or sysctl kernel.perf_event_paranoid=0"


class Link(NamedTuple):
    """How one family of CPUs counts what arrives."""

    cpus: str  # vendor-family-model, the last in hexadecimal as in mapfile.csv; "" where cpuinfo has no vendor (arm64)
    unit: str
    events: tuple[str, ...]  # in perf's syntax: terms, or names of sysfs events
    nbytes: float  # of one count
    key: str = KEY
    far: bool = False  # counted as it leaves the other of two sockets


def _beats(first: int, links: int, umask: int) -> tuple[str, ...]:
    return tuple(f"event={first + 0x40 * link:#x},umask={umask:#x}" for link in range(links))


_DEVICES = f"{KEY}_to_devices"
LINKS = (
    Link("GenuineIntel-6-(55|6[AC]|8F|CF|A[DE])", r"uncore_upi_\d+", ("event=0x3,umask=0xf",), 64 / 9),
    Link("AuthenticAMD-26-[12467]?.", "amd_df", _beats(0xD5F, 6, 0xF3F), 64),
    Link("AuthenticAMD-25-[^245].", "amd_df", _beats(0xB5F, 8, 0xF3E), 64, far=True),
    Link("AuthenticAMD-(23-[^12].|25-[245]?.)", "amd_df", _beats(0x7C7, 4, 0x2), 32, far=True),
    Link("", r"nvidia_nvlink_c2c\d_pmu_\d+", ("rd_bytes_rem,port=0x3",), 1, _DEVICES),
    Link("", r"nvidia_pcie_pmu_\d+", ("rd_bytes_rem,root_port=0x3ff",), 1, _DEVICES),
)
Counter = tuple[Link, str, tuple[int, int, int, int]]  # its row, its unit, what ``perf_event_open`` takes


class SocketLink:
    """Counters of what arrives at the socket of ``cpus``, open until :meth:`close`; else why there are none.

    Neither opening nor reading raises.
    """

    def __init__(self, cpus: Sequence[int], tree: Tree | None = None) -> None:
        self.absent: str | None = None
        self._counters: dict[int, Counter] = {}
        try:
            for counter in wanted(tree or Tree(), cpus):
                self._counters[_syscalls.perf_event_open(*counter[2])] = counter
            self._last = self._read()
        except (EngramError, OSError, ValueError, struct.error) as error:  # ValueError: a number that is none
            denied = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM)
            self.close(f"{error}; {_DENIED}" if denied else str(error))

    def take(self) -> dict[str, float | str]:
        """Bytes since the last take, scaled up where the kernel shared a counter out, or why there are none."""
        found: dict[str, float | str] = {}
        try:
            before, self._last = self._last, self._read()
        except (OSError, struct.error) as error:
            return {KEY: str(error)}
        for fd, (link, unit, _) in self._counters.items():
            count, enabled, running = (now - then for now, then in zip(self._last[fd], before[fd], strict=True))
            if not running:
                return {KEY: f"{unit} did not count: others hold its counters"}
            found[link.key] = float(found.get(link.key, 0)) + link.nbytes * count * enabled / running
        return found if self.absent is None else {KEY: self.absent}

    def _read(self) -> dict[int, tuple[int, ...]]:
        return {fd: struct.unpack("3Q", os.read(fd, 24)) for fd in self._counters}

    def close(self, reason: str = "its counters are closed") -> None:
        """Give the counters back; what is taken from then on is ``reason``."""
        while self._counters:
            os.close(self._counters.popitem()[0])
        self._last, self.absent = {}, self.absent or reason


def describe(tree: Tree) -> str:
    """What a rank on the first CPU would count, and by which units; the live machine is asked to open them.

    Raises ``NotMeasurable`` where there is nothing to count, or the kernel refuses.
    """
    cpus = tree.need_numbers(_ONLINE)[:1]
    counters = wanted(tree, cpus)
    if tree.live:
        with closing(SocketLink(cpus, tree)) as link:
            if link.absent:
                raise NotMeasurable(link.absent)
    units = ", ".join(dict.fromkeys(unit for _, unit, _ in counters))
    paranoid = tree.number("proc/sys/kernel/perf_event_paranoid")
    return f"bytes that arrive ({counters[0][0].key}) by {units}; perf_event_paranoid {paranoid}"


def wanted(tree: Tree, cpus: Sequence[int]) -> list[Counter]:
    """The counters for a rank on ``cpus``; raises ``NotMeasurable`` with the reason where there are none."""
    if not (units := tree.names(_UNITS, _KIN)):
        seen = f"no uncore or fabric unit in /{_UNITS}: a virtual machine hides them, or no driver is loaded"
        raise NotMeasurable(seen)
    model = _model(tree)
    rows = [(link, unit) for link in LINKS if re.fullmatch(link.cpus, model) for unit in tree.names(_UNITS, link.unit)]
    home = {cpu: socket for socket, its in read_sockets(tree)[0].items() for cpu in its}
    own, sockets = {_socket(home, cpu) for cpu in cpus}, {_socket(home, cpu) for cpu in tree.need_numbers(_ONLINE)}
    if len(own) != 1 or len(sockets) < 2 or (len(sockets) > 2 and any(link.far for link, _ in rows)):
        raise NotMeasurable(f"the rank's CPUs are on {len(own)} of {len(sockets)} sockets: no one link to count")
    counters = [
        (link, unit, (int(_need(tree, unit, "type")), *_encode(tree, unit, event), cpu))
        for link, unit in rows
        for cpu in parse_list(_need(tree, unit, "cpumask"), where=f"/{_UNITS}/{unit}/cpumask")
        if _socket(home, cpu) in (sockets - own if link.far else own)
        for event in link.events
    ]
    if not counters:
        raise NotMeasurable(f"{', '.join(units)}: no known event counts this socket's link on {model or 'this CPU'}")
    return counters


def _encode(tree: Tree, unit: str, event: str) -> tuple[int, int]:
    """(config, config1) of perf's terms: each one's bits go where its format file says."""
    words = {"config": 0, "config1": 0}
    parts = (part if "=" in part else _need(tree, unit, f"events/{part}") for part in event.split(","))
    for term in ",".join(parts).split(","):
        name, _, text = term.partition("=")
        word, _, places = _need(tree, unit, f"format/{name}").partition(":")
        bits, value = parse_list(places, where=f"/{_UNITS}/{unit}/format/{name}"), int(text, 0)
        if value >> len(bits) or word not in words:
            raise NotMeasurable(f"{unit} cannot take {term}: its {name} is {word}:{places}")
        words[word] |= sum((value >> index & 1) << bit for index, bit in enumerate(bits))
    return words["config"], words["config1"]


def _need(tree: Tree, unit: str, name: str) -> str:
    if (text := tree.text(f"{_UNITS}/{unit}/{name}")) is None:
        raise NotMeasurable(f"/{_UNITS}/{unit}/{name} is absent or unreadable")
    return text


def _socket(home: dict[int, int], cpu: int) -> int:
    if cpu not in home:
        raise NotMeasurable(f"the socket of CPU {cpu} is unknown")
    return home[cpu]


def _model(tree: Tree) -> str:
    lines = r"^vendor_id\s*: (\S+)\ncpu family\s*: (\d+)\nmodel\s*: (\d+)$"
    found = re.search(lines, tree.text("proc/cpuinfo") or "", re.M)
    return f"{found[1]}-{found[2]}-{int(found[3]):X}" if found else ""
