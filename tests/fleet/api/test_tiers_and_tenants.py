"""Runs the commands of docs/tiers-and-tenants.md, on other ports: they do what the page says."""

import os
from pathlib import Path

import pytest

from loadgen.fleet.ports import free_port
from tests.infra.page_run import PageRun, blocks


@pytest.mark.slow
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    nats, http = str(free_port()), str(free_port())
    file = str(tmp_path / "slackline.toml")
    write, up, ask, change = (
        block.replace("slackline.toml", file).replace(":8080", f":{http}")
        for block in blocks("tiers-and-tenants.md", "## On this machine")
    )
    up = up.rstrip() + f" --port {nats} --http-port {http}\n"
    page = PageRun(os.environ | {"SLACKLINE_URL": f"nats://127.0.0.1:{nats}", "NO_PROXY": "*"})
    assert "every service would start with it" in page.once(write)
    with page.running(up, tmp_path / "up.log"):
        page.until_up(f"http://127.0.0.1:{http}/ready", tmp_path / "up.log")
        assert '"service_tier":"autocomplete"' in page.once(ask).replace(" ", "")
        told = page.once(change)
        assert "tenants.acme" not in told  # its lines went into the file
        assert '"service_tier":"nightly"' in told.replace(" ", "")
        assert "without a key: 401" in told
