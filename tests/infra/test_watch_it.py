"""Runs docs/watch-it.md as it says, on other ports: a fleet, a Prometheus, a load, its answers."""

import os
import time
from pathlib import Path

import pytest

from loadgen.fleet.ports import free_port
from tests.infra.page_run import WITHIN_S, PageRun, blocks
from tests.infra.prometheus import SHIPPED, find

# the answers: one of each query of the page
TOLD = ('{tier="chat"} =>', 'type="ttft"} =>', '{replica="r1"} =>', '{model_name="sim-')


@pytest.mark.slow
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    find("prometheus")
    up, watch, load, look = blocks("watch-it.md", "## On this machine")
    nats, http, metrics, asked = (str(free_port()) for _ in range(4))
    config = (SHIPPED / "local.yml").read_text()
    assert ":9464" in config
    assert "9464" in up
    written = tmp_path / "local.yml"
    written.write_text(
        config.replace("9464", metrics).replace("[rules.yml]", f"[{SHIPPED / 'rules.yml'}]")
    )
    watch = watch.replace("infra/prometheus/local.yml", str(written))
    watch = watch.replace("var/watched", str(tmp_path / "watched"))
    watch = watch.rstrip() + f" --web.listen-address=127.0.0.1:{asked}\n"
    look = look.replace(":9090", f":{asked}")
    up = up.rstrip().replace("9464", metrics) + f" --port {nats} --http-port {http}"
    page = PageRun(os.environ | {"SLACKLINE_URL": f"nats://127.0.0.1:{nats}", "NO_PROXY": "*"})
    with page.running(up, tmp_path / "up.log"):
        page.until_up(f"http://127.0.0.1:{metrics}/metrics", tmp_path / "up.log")
        with page.running(watch, tmp_path / "prometheus.log"):
            page.until_up(f"http://127.0.0.1:{asked}/-/ready", tmp_path / "prometheus.log")
            page.once(load)
            end, told = time.monotonic() + WITHIN_S, ""
            while not all(one in told for one in TOLD) and time.monotonic() < end:
                told = page.once(look)
                time.sleep(1.0)
            assert [one for one in TOLD if one not in told] == [], told
