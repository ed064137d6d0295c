"""Boot a small guest kernel with several NUMA nodes under software emulation and run one command inside it.

``python tests/guest/boot.py two -- .venv/bin/python -m pytest tests/guest/inside``: the guest sees the host's root
read-only over 9p, has its own tmpfs on /tmp, /run and /dev/shm, and brings results out through a second share.
KVM is never probed: a nested one may exist and still hang.  Exit code: the command's own, 124 for a time-out,
70 if the guest panicked, 69 if no emulator or kernel can be had here.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "guest"
MODULES = ("virtio_pci", "9pnet_virtio", "9p")
TIMED_OUT, PANICKED, UNAVAILABLE = 124, 70, 69
ACCELERATOR = "tcg,thread=single,tb-size=512"
GUEST_OUT = "/mnt/out"  # what $OUT says in the guest, see init.sh
QUIET = "panic=-1 quiet loglevel=3 numa_balancing=disable norandmaps nokaslr mitigations=off"


class Unavailable(Exception):  # noqa: N818 - not a failure: its text says why nothing is measured
    """No emulator, kernel or tool to build a guest with; the message says which."""


@dataclass(frozen=True)
class Node:
    """One guest NUMA node; 0 MiB makes it memory-less, no CPUs makes it memory-only."""

    cpus: str
    mib: int


@dataclass(frozen=True)
class Machine:
    """A guest machine.  ``displays`` puts a display-class PCI device behind a root port of each named node."""

    nodes: tuple[Node, ...]
    distances: tuple[tuple[int, int, int], ...] = ()
    displays: tuple[int, ...] = ()

    @property
    def cpus(self) -> int:
        return 1 + max(int(node.cpus.rsplit("-")[-1]) for node in self.nodes if node.cpus)


MACHINES = {
    "two": Machine(nodes=(Node("0", 1536), Node("1", 1536)), distances=((0, 1, 21),), displays=(0, 1)),
    "four": Machine(  # node 2 has CPUs and no memory, node 3 memory and no CPUs
        nodes=(Node("0", 1280), Node("1", 1024), Node("2", 0), Node("", 512)),
        distances=((0, 1, 21), (0, 2, 12), (0, 3, 31), (1, 2, 22), (1, 3, 17), (2, 3, 33)),
        displays=(1,),
    ),
}


def numa_arguments(machine: Machine) -> list[str]:
    """qemu's words for the machine's nodes, distances and per-node PCI devices."""
    words: list[str] = []
    for number, node in enumerate(machine.nodes):
        entry = f"node,nodeid={number}" + (f",cpus={node.cpus}" if node.cpus else "")
        if node.mib:
            words += ["-object", f"memory-backend-ram,id=m{number},size={node.mib}M"]
            entry += f",memdev=m{number}"
        words += ["-numa", entry]
    for source, target, distance in machine.distances:
        words += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    for place, node_id in enumerate(machine.displays):
        bus = 64 + 32 * place
        words += ["-device", f"pxb-pcie,id=pxb{place},bus_nr={bus},bus=pcie.0,numa_node={node_id}"]
        words += ["-device", f"pcie-root-port,id=rp{place},bus=pxb{place},chassis={11 + place},slot={11 + place}"]
        words += ["-device", f"bochs-display,bus=rp{place}"]
    return words


def prepare(cache: Path = CACHE) -> tuple[Path, Path]:
    """(kernel, initramfs), fetched and built once; nothing is installed."""
    for tool in ("qemu-system-x86_64", "busybox", "cpio", "apt-get", "dpkg-deb", "depmod"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (qemu-system-x86 busybox-static cpio kmod)")
    kernel, initramfs = cache / "vmlinuz", cache / "initramfs.gz"
    if not kernel.exists():
        _fetch_kernel(cache)
    sources = (Path(__file__), Path(__file__).with_name("init.sh"), kernel)
    if not initramfs.exists() or initramfs.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        _build_initramfs(cache, initramfs)
    return kernel, initramfs


def _fetch_kernel(cache: Path) -> None:
    """The newest 6.12 generic kernel that the distribution's meta-package depends on (cloud kernels lack 9p)."""
    cache.mkdir(parents=True, exist_ok=True)
    depends = _output("apt-cache", "depends", "linux-image-6.12-amd64") or _output(
        "apt-cache", "depends", "linux-image-amd64"
    )
    names = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    if not names:
        raise Unavailable("no linux-image-6.12-amd64 or linux-image-amd64 package is known; run apt-get update")
    _do("apt-get", "download", "-qq", names[0], cwd=cache)
    package = max(cache.glob("linux-image-*.deb"), key=lambda path: path.stat().st_mtime)
    tree = cache / "kernel"
    shutil.rmtree(tree, ignore_errors=True)
    _do("dpkg-deb", "-x", str(package), str(tree))
    shutil.copy(next((tree / "boot").glob("vmlinuz-*")), cache / "vmlinuz")
    package.unlink()


def _do(*command: str, cwd: Path | None = None, text: bytes = b"") -> bytes:
    """What a tool prints; a tool that fails leaves no guest, and its last line says why."""
    done = subprocess.run(command, cwd=cwd, input=text, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unavailable(f"{' '.join(command)}: {said[-1] if said else f'exit {done.returncode}'}")
    return done.stdout


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _module_order(tree: Path) -> list[Path]:
    """The modules that 9p over virtio needs, dependencies first (from a fresh modules.dep)."""
    base = next((p for p in (tree / "lib/modules", tree / "usr/lib/modules") if p.is_dir()), None)
    if base is None:
        raise Unavailable(f"the kernel package has no modules below {tree}")
    version = next(base.iterdir()).name
    _do("depmod", "-b", str(base.parents[1]), version)
    depends: dict[str, list[str]] = {}
    for line in (base / version / "modules.dep").read_text().splitlines():
        name, _, needs = line.partition(":")
        depends[name] = needs.split()
    by_stem = {Path(name).name.split(".")[0].replace("-", "_"): name for name in depends}
    order: list[str] = []
    for stem in MODULES:
        if stem in by_stem:  # absent: built in
            order += [n for n in (*reversed(depends[by_stem[stem]]), by_stem[stem]) if n not in order]
    return [base / version / name for name in order]


def _build_initramfs(cache: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("bin", "mods", "proc", "sys", "dev", "host", "under"):
            (tree / name).mkdir()
        shutil.copy(shutil.which("busybox") or "", tree / "bin/busybox")
        loads = []
        for number, module in enumerate(_module_order(cache / "kernel")):
            data = module.read_bytes()
            data = lzma.decompress(data) if module.suffix == ".xz" else data
            name = f"{number:02}-{module.name.split('.')[0]}.ko"
            (tree / "mods" / name).write_bytes(data)
            loads.append(f"insmod /mods/{name}")
        script = (Path(__file__).parent / "init.sh").read_text().replace("@MODULES@", "\n".join(loads))
        (tree / "init").write_text(script)
        (tree / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        archive = _do("cpio", "-o", "-H", "newc", "--quiet", cwd=tree, text=names.encode())
        target.write_bytes(gzip.compress(archive, 1))


def arguments(machine: Machine, kernel: Path, initramfs: Path, out: Path) -> list[str]:
    """The whole qemu command for a machine; ``out`` is the folder that the guest may write to."""
    memory = sum(node.mib for node in machine.nodes)
    return [
        "qemu-system-x86_64", "-machine", "q35", "-accel", ACCELERATOR, "-cpu", "max",
        "-smp", f"{machine.cpus},sockets={machine.cpus}",
        "-m", f"{memory}M", "-display", "none", "-vga", "none", "-nodefaults", "-no-reboot", "-serial", "stdio",
        "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04",
        "-kernel", str(kernel), "-initrd", str(initramfs), "-append", f"console=ttyS0 {QUIET}",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host,bus=pcie.0",
        "-fsdev", f"local,id=out,path={out.resolve()},security_model=none",
        "-device", "virtio-9p-pci,fsdev=out,mount_tag=out,bus=pcie.0",
        *numa_arguments(machine),
    ]  # fmt: skip


def below_tmp(*places: Path | str) -> list[str]:
    """The places that the guest's own tmpfs on /tmp would hide; each once, none inside another."""
    found = sorted({str(place) for place in places if Path(place).is_relative_to("/tmp")})
    return [place for place in found if not any(place.startswith(f"{other}/") for other in found)]


def boot(
    machine: Machine,
    command: list[str],
    out: Path,
    *,
    timeout: float,
    cwd: Path = ROOT,
    console: IO[bytes] | None = None,
) -> int:
    """Run ``command`` in the guest; files it writes under ``$OUT`` appear in ``out``.  Returns its exit code.

    The serial console goes to ``console``, by default to our own output.
    """
    kernel, initramfs = prepare()
    out.mkdir(parents=True, exist_ok=True)
    (out / "command.sh").write_text(f"cd {shlex.quote(str(cwd))} && exec {shlex.join(command)}\n")
    (out / "keep").write_text("".join(f"{place}\n" for place in below_tmp(cwd, sys.prefix, sys.base_prefix)))
    qemu = arguments(machine, kernel, initramfs, out)
    try:
        status = subprocess.run(
            qemu, stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=timeout, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    return exit_code(status)


def exit_code(status: int) -> int:
    """The debug port turns the command's code c into 2c + 1; anything even, or a signal's number, is no answer."""
    return (status - 1) // 2 if status > 0 and status % 2 else PANICKED


def main() -> int:
    """Parse ``MACHINE -- COMMAND…`` and boot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=sorted(MACHINES))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    start = time.monotonic()
    try:
        out = chosen.out or Path(tempfile.mkdtemp(prefix="numa-guest-"))
        code = boot(MACHINES[chosen.machine], chosen.command, out, timeout=chosen.timeout)
    except Unavailable as reason:
        print(f"NOT_MEASURED: no NUMA guest here: {reason}")
        return UNAVAILABLE
    print(f"guest {chosen.machine}: exit {code} after {time.monotonic() - start:.0f} s, results in {out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
