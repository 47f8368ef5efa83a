"""Runs docs/run-on-my-gpu.md as it says, with the shipped model, on the GPU or else on the CPU."""

import os
from pathlib import Path

import pytest

from loadgen.fleet.ports import free_port
from tests.infra.page_run import PageRun, blocks

YOURS = "/srv/models/Llama-3-8B-Instruct"


@pytest.mark.slow
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    look, up, ask, load, keep = blocks("run-on-my-gpu.md", "## With torch")
    nats, http, metrics = (str(free_port()) for _ in range(3))
    assert YOURS in up
    up = up.rstrip().replace(YOURS, "slackline-5m").replace("9464", metrics)
    ask = ask.replace(":8080", f":{http}").replace(":9464", f":{metrics}")
    environment = {
        "SLACKLINE_URL": f"nats://127.0.0.1:{nats}",
        "NO_PROXY": "*",
        "SLACKLINE_WORKER_PROFILE_S": "20",  # a busy CPU may not get to a fit in four
    }
    page = PageRun(os.environ | environment)
    assert page.once(look).startswith("GPU: ")
    with page.running(f"{up} --port {nats} --http-port {http}", tmp_path / "up.log"):
        page.until_up(f"http://127.0.0.1:{metrics}/metrics", tmp_path / "up.log")
        told = page.once(ask)
        assert "slackline-5m" in told and '"finish_reason"' in told
        assert 'replica="r1",regime="all"}' in told
        assert "interactive" in page.once(load)
        kept = tmp_path / "my-gpu.json"
        told = page.once(keep.replace("my-gpu.json", str(kept)))
        assert f"wrote {kept}, the profile of r1" in told
        assert "requests/s with slackline" in told
