"""After each test every KV block of the torch engines so far, and of their draft models, has its
owners. Once the slots of those that the test made are released, all blocks are free.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

KNOWN: WeakSet[Any] = WeakSet()  # the torch engines


@pytest.fixture(autouse=True, scope="session")
def torch_engines() -> Iterator[None]:
    """Remembers each torch engine, where a test has imported it."""
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules.get("services.worker.engines.torch_engine")
        if module is not None:
            begin = module.TorchEngine.__init__

            @functools.wraps(begin)
            def remember(self: Any, *args: Any, **options: Any) -> None:
                begin(self, *args, **options)
                KNOWN.add(self)

            patch.setattr(module.TorchEngine, "__init__", remember)
        yield


@pytest.fixture(autouse=True)
def no_block_is_leaked(torch_engines: None) -> Iterator[None]:
    before = list(KNOWN)
    yield
    for engine in list(KNOWN):
        engine.check()
        if engine in before:
            continue
        engine.close()
        assert engine.snapshot() == (engine.facts.kv_blocks, [], 0, 0), "blocks are leaked"
        draft = engine._draft
        assert draft is None or draft.free_blocks == draft.kv_blocks, "the draft has leaked blocks"
