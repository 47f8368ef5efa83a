"""Checks after each test that no engine has leaked a KV block. Engines that the test made have all
blocks free again once their slots are released; shared torch engines check their own counts.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

ENGINES = {
    "services.worker.engines.torch.engine": "TorchEngine",
    "services.worker.engines.sim.engine": "SimEngine",
}
SHARED: WeakSet[Any] = WeakSet()  # torch engines, also those of fixtures
MADE: list[Any] = []  # by the present test; kept here, since its local variables will be gone


@pytest.fixture(autouse=True, scope="session")
def remembered_engines() -> Iterator[None]:
    """Remembers each engine, where a test has imported it."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ENGINES.items():
            if module in sys.modules:
                engine = getattr(sys.modules[module], name)
                patch.setattr(engine, "__init__", _remembered(engine.__init__))
        yield
        MADE.clear()


def _remembered(begin: Any) -> Any:
    @functools.wraps(begin)
    def remember(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        MADE.append(self)
        if hasattr(self, "check"):
            SHARED.add(self)

    return remember


@pytest.fixture(autouse=True)
def no_block_is_leaked(remembered_engines: None) -> Iterator[None]:
    MADE.clear()  # engines of fixtures with a wider scope
    yield
    for engine in SHARED:
        engine.check()
    made = MADE.copy()
    MADE.clear()
    for engine in made:
        for slot in engine.snapshot().slots:
            engine.release(slot)
        assert engine.snapshot() == (engine.facts.kv_blocks, [], 0, 0), "blocks are leaked"
        draft = getattr(engine, "_draft", None)
        if hasattr(draft, "kv_blocks"):
            assert draft.free_blocks == draft.kv_blocks, "the draft has leaked blocks"
