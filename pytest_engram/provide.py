"""The fixtures, all prefixed ``engram_``; the plugin registers this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from pytest_engram.backends.protocol import Backend
    from pytest_engram.edge import Edge
    from pytest_engram.hashing import EngramLayout
    from pytest_engram.model import Evidence, Experiment, Topology
    from pytest_engram.session import Outcome
    from pytest_engram.tables import PlacedTable


@pytest.fixture(scope="session")
def engram_edge(pytestconfig: pytest.Config) -> Edge:
    """The plugin's own state of this session; the other fixtures are windows into it."""
    return cast("Edge", pytestconfig.pluginmanager.get_plugin("engram-edge"))


@pytest.fixture(scope="session")
def engram_topology(engram_edge: Edge) -> Topology:
    """This machine's NUMA nodes, sockets and GPUs, as the kernel and the drivers answer."""
    return engram_edge.session.topology


@pytest.fixture(scope="session")
def engram_backend(pytestconfig: pytest.Config) -> Backend:
    """The system under test that ``--engram-backend`` names."""
    from pytest_engram.backends import load_backend

    return load_backend(pytestconfig.getoption("--engram-backend"))


@pytest.fixture(scope="session")
def engram_layout() -> EngramLayout:
    """The layout of DeepSeek-V4.1: primes, offsets and multipliers with their golden values."""
    from pytest_engram.hashing import EngramLayout

    return EngramLayout.deepseek_v41()


@pytest.fixture(scope="session")
def engram_oracle() -> Any:
    """The numpy oracle: a namespace with ``hash_ids``, ``decode_rows`` and ``synthetic_rows``."""
    from types import SimpleNamespace

    from pytest_engram import hashing, rows

    return SimpleNamespace(hash_ids=hashing.hash_ids, decode_rows=rows.decode_rows, synthetic_rows=rows.synthetic_rows)


@pytest.fixture
def engram_table(engram_topology: Topology) -> Iterator[Callable[..., PlacedTable]]:
    """Factory of placed tables shared by real peer processes; everything is released at teardown.

    ``engram_table(policy="bind:0", backing="tmpfs", ranks=2, rows=100_000)`` -> ``PlacedTable`` with ``buffer``,
    ``receipts``, ``distributions`` (every rank, every moment) and ``views``.
    """
    from pytest_engram.tables import place

    default: dict[str, Any] = {"policy": "default", "backing": "tmpfs", "ranks": 1, "rows": 100_000, "seed": 20261}
    with ExitStack() as made:
        yield lambda **asked: made.enter_context(closing(place(engram_topology, **(default | asked))))


@pytest.fixture
def engram_prefetch(engram_table: Callable[..., PlacedTable], engram_backend: Backend) -> Iterator[Callable[..., Any]]:
    """Factory of engines: ``engram_prefetch(table, engine="cpu")`` serves one serial prefetch stream over it."""
    from pytest_engram.tables import engine_over

    with ExitStack() as made:
        yield lambda table=None, *, engine="cpu", **workload: made.enter_context(
            closing(engine_over(table or engram_table(), engram_backend, engine=engine, **workload))
        )


@pytest.fixture
def engram_experiment(request: pytest.FixtureRequest, engram_edge: Edge) -> Experiment:
    """One experiment; give its id by indirect parametrisation."""
    from pytest_engram.session import check_ids

    identifier = getattr(request, "param", "")
    check_ids([identifier], engram_edge.session.experiments)
    return engram_edge.session.experiments[identifier]


@pytest.fixture
def engram_arm(request: pytest.FixtureRequest) -> str:
    """An arm of ``engram_experiment``: A, A' or a candidate's name."""
    return str(request.param)


@pytest.fixture
def engram_outcome(engram_experiment: Experiment, engram_edge: Edge) -> Outcome:
    """The experiment's verdict; the whole schedule runs when it is first asked for."""
    return engram_edge.session.outcome(engram_experiment.id)


@pytest.fixture
def engram_evidence(engram_outcome: Outcome, engram_edge: Edge) -> Evidence:
    """The experiment's evidence; skips as the experiment's own item does where none could be taken."""
    return engram_edge.evidence(engram_outcome)


@pytest.fixture
def engram_settle(engram_outcome: Outcome, engram_edge: Edge, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Turns the verdict into this item's outcome: skip for an absence, fail where gates are enforced."""
    return lambda: engram_edge.settle(engram_outcome, request.node)


@pytest.fixture
def engram_publish(
    engram_outcome: Outcome, engram_arm: str, engram_edge: Edge, request: pytest.FixtureRequest
) -> Callable[[], None]:
    """Replays the arm's own samples through pytest-benchmark, so that its tools can read them."""
    return lambda: engram_edge.publish(engram_outcome, engram_arm, request)
