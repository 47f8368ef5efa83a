"""The fixture `at`: a running gateway with a stand-in for the fleet behind it, for one test."""

from collections.abc import AsyncIterator

import pytest

from tests.services.gateway.site import Site, site


@pytest.fixture
async def at(nats_url: str) -> AsyncIterator[Site]:
    async with site(nats_url) as at:
        yield at
