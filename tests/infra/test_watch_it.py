"""The page docs/watch-it.md, done as it says: a fleet, a Prometheus, a load, and the answers. Ports
and folders are others, since the machine may have them in use.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.infra.prometheus import ROOT, SHIPPED, find, free_port

PAGE = ROOT / "docs" / "watch-it.md"
WITHIN_S = 300.0  # the longest that a busy machine may take for anything
# what each query of the page tells of
TOLD = ('{tier="chat"} =>', 'type="ttft"} =>', '{replica="r1"} =>', '{model_name="sim-')


def blocks() -> list[str]:
    """The commands under *On this machine*, as they follow one another."""
    _, _, rest = PAGE.read_text().partition("## On this machine")
    return re.findall(r"```sh\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)


@contextmanager
def running(script: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    """A terminal with these commands, until Ctrl-C."""
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-ec", f"exec {script}" if "\n" not in script.strip() else script],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, 2)
            process.wait(WITHIN_S)


def once(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-ec", script],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    find("prometheus")
    up, watch, load, look = blocks()
    nats, http, metrics, asked = (str(free_port()) for _ in range(4))
    config = (SHIPPED / "local.yml").read_text()
    assert ":9464" in config and "9464" in up
    written = tmp_path / "local.yml"
    written.write_text(
        config.replace("9464", metrics).replace("[rules.yml]", f"[{SHIPPED / 'rules.yml'}]")
    )
    watch = watch.replace("infra/prometheus/local.yml", str(written))
    watch = watch.replace("var/watched", str(tmp_path / "watched"))
    watch = watch.rstrip() + f" --web.listen-address=127.0.0.1:{asked}\n"
    look = look.replace(":9090", f":{asked}")
    up = up.rstrip().replace("9464", metrics) + f" --port {nats} --http-port {http}"
    environment = os.environ | {"SLACKLINE_URL": f"nats://127.0.0.1:{nats}", "NO_PROXY": "*"}
    with running(up, environment, tmp_path / "up.log"):
        until_up(f"http://127.0.0.1:{metrics}/metrics", tmp_path / "up.log")
        with running(watch, environment, tmp_path / "prometheus.log"):
            until_up(f"http://127.0.0.1:{asked}/-/ready", tmp_path / "prometheus.log")
            once(load, environment)
            end, told = time.monotonic() + WITHIN_S, ""
            while not all(one in told for one in TOLD) and time.monotonic() < end:
                told = once(look, environment)
                time.sleep(1.0)
            assert [one for one in TOLD if one not in told] == [], told


def until_up(url: str, log: Path) -> None:
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())
