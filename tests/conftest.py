"""Fixtures and settings of all tests: a real nats-server, a module's own event loops, and no
deadlines for Hypothesis.
"""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from loadgen.fleet.nats_server import NatsServer
from shared.bus.nats import connect

# A shell's background job begins with SIGINT ignored, and its children would ignore it too: tests
# press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure: no example has a deadline, and drawing one may take its time. Each
# property tries SLACKLINE_EXAMPLES, unless it says how many.
settings.register_profile(
    "slackline",
    deadline=None,
    print_blob=True,
    max_examples=int(os.environ.get("SLACKLINE_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slackline")


# The collector of garbage takes its turns after so many new objects, of these, and of those again;
# Python's own are 700, 10, 10.
TURNS = (3000, 20, 10)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the collector what is imported by now, and most of its turns: they took a fifth of a
    simulated fleet's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*TURNS)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test of a module once on every loop of its LOOP_FACTORIES."""
    module = item.getparent(pytest.Module)
    factories = getattr(module.obj if module else None, "LOOP_FACTORIES", None)
    return factories or {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def default_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo a test's configuration of the logs, which may name a stream that is closed by then. The
    services of a module with QUIET log next to nothing.
    """
    if getattr(request.module, "QUIET", False):
        level = logging.CRITICAL
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    yield
    structlog.reset_defaults()


def make_streams(url: str) -> None:
    """The operator's step: buckets, and the logs of two replicas."""

    async def make() -> None:
        async with connect(url, "operator") as bus:
            await bus.make_streams(["r0", "r1"])

    with ThreadPoolExecutor(1) as thread:  # a fixture may run inside a loop
        thread.submit(asyncio.run, make()).result()


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one server for the whole module: tests use names of their own."""
    server = NatsServer()
    url = server.start(tmp_path_factory.mktemp("nats"))
    make_streams(url)
    yield url
    server.stop()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server for one test, which may stop, kill and start it again on `tmp_path / "nats"`."""
    server = NatsServer()
    make_streams(server.start(tmp_path / "nats"))
    yield server
    server.stop()
