"""The machine as it was found.  Unknown stays unknown: ``None`` with a reason, never node 0."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node.  ``distances`` maps node id to the firmware's relative distance (10 = local)."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    reclaimable_bytes: int
    distances: dict[int, int]
    hugepages: dict[int, tuple[int, int]] = field(default_factory=dict)  # page bytes -> (total, free)
    gpu_memory: bool = False  # a coherent GPU's own memory, not a place for host tables

    @property
    def has_memory(self) -> bool:
        """Whether any page can lie here."""
        return self.memory_bytes > 0

    @property
    def available_bytes(self) -> int:
        """Free plus reclaimable bytes; a reserve is the caller's business."""
        return self.free_bytes + self.reclaimable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU keyed by PCI address.  ``node_by_source`` keeps every source's own answer; None is "unknown"."""

    pci: str
    name: str | None = None
    uuid: str | None = None
    node_by_source: dict[str, int | None] = field(default_factory=dict)
    numa_node: int | None = None
    node_absent: str | None = None  # why numa_node is None: unknown, or the sources contradict
    pci_path: tuple[str, ...] = ()  # from the root port down to the device
    link: str | None = None  # e.g. "16.0 GT/s x16"
    peers: dict[str, str] = field(default_factory=dict)  # other GPU's PCI address -> NVLink, shared switch, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAnswer:
    """What one source knows about one GPU.  Absent fields are None; ``reason`` says why it names no node."""

    nodes: tuple[int, ...] | None = None  # host NUMA nodes nearest to the GPU
    cpus: tuple[int, ...] | None = None  # host CPUs nearest to the GPU
    own_node: int | None = None  # the node of the GPU's own coherent memory: never its nearest host node
    name: str | None = None
    uuid: str | None = None
    peers: dict[str, str] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """NUMA nodes, sockets, GPUs and what the current process may use of them."""

    nodes: tuple[NumaNode, ...]
    sockets: dict[int, tuple[int, ...]]  # physical package -> CPUs
    gpus: tuple[Gpu, ...] = ()
    cpus_allowed: tuple[int, ...] = ()
    mems_allowed: tuple[int, ...] = ()
    hypervisor: str | None = None
    coherent: bool = False  # GPU memory appears as NUMA nodes (Grace): never pooled with PCIe machines
    notes: tuple[str, ...] = ()

    @property
    def memory_nodes(self) -> tuple[NumaNode, ...]:
        """Nodes that can hold a host table for this process: memory, not a GPU's, allowed."""
        allowed = self.mems_allowed or [node.id for node in self.nodes]
        return tuple(node for node in self.nodes if node.has_memory and not node.gpu_memory and node.id in allowed)

    def node(self, number: int) -> NumaNode | None:
        """The node of that number, if there is one."""
        return next((node for node in self.nodes if node.id == number), None)

    def node_of_cpu(self, cpu: int) -> int | None:
        """The node that a CPU belongs to."""
        return next((node.id for node in self.nodes if cpu in node.cpus), None)

    def socket_nodes(self) -> dict[int, tuple[int, ...]]:
        """Socket -> its memory nodes; more than one means sub-NUMA clustering."""
        return {
            socket: tuple(node.id for node in self.memory_nodes if set(node.cpus) & set(cpus))
            for socket, cpus in self.sockets.items()
        }
