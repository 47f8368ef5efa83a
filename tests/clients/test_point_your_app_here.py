"""Tests of the examples in docs/point-your-app-here.md: each runs as it stands, on a real fleet."""

import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.clients.environment import NODE, PYTHON, ROOT, run
from tests.fleet.live import DEFAULT

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make test-clients` makes its environment"
)
on_one_loop = pytest.mark.asyncio(loop_scope="module")
PAGE = ROOT / "docs" / "point-your-app-here.md"
EXAMPLE = re.compile(r"^<!-- run: (\w+) -->\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = EXAMPLE.findall(PAGE.read_text())
SAID = "A river is water that flows."
ADDRESS = "http://127.0.0.1:8080"
PACKAGES = ROOT / ".venv-clients" / "js"
GO_PACKAGES = Path("/usr/share/gocode")  # where Debian has them
NAMES = {"sh": "example.sh", "python": "example.py", "node": "example.mjs", "go": "example.go"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps([{"say": SAID}]))
    environment = {"SLACKLINE_WORKER_SCRIPT": str(script)}
    async with Fleet(FleetSpec(pace=0.1, drain_s=2.0, environment=environment)) as fleet:
        yield fleet


@on_one_loop
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_prints_the_answer(fleet: Fleet, tmp_path: Path, number: int) -> None:
    kind, text = EXAMPLES[number]
    access = fleet.access(DEFAULT)
    environment = {
        "SLACKLINE_URL": access.url,
        "SLACKLINE_CREDS": access.creds,
        "SLACKLINE_TLS_CA": access.tls_ca,
    }
    file = tmp_path / NAMES[kind]
    file.write_text(text.replace(ADDRESS, fleet.http_url))
    match kind:
        case "python":
            command = [PYTHON, file]
        case "node":
            if not (PACKAGES / "node_modules").exists():
                pytest.skip("`make test-clients` installs the package for JavaScript with npm")
            (tmp_path / "node_modules").symlink_to(PACKAGES / "node_modules")
            command = [NODE, file]
        case "go":
            if not (GO_PACKAGES / "src" / "github.com" / "nats-io" / "nats.go").exists():
                pytest.skip("infra/go.sh installs Go with its package for NATS")
            environment |= {"GO111MODULE": "off", "GOPATH": str(GO_PACKAGES), "GOFLAGS": "-p=1"}
            environment |= {"GOCACHE": str(tmp_path / "cache")}
            command = ["go", "run", file]
        case _:
            command = ["bash", "-eu", file]
    said = await run(command, environment, tmp_path)
    assert ("data: [DONE]" if kind == "sh" else SAID) in said, said
    assert "eof_received" not in said, "asyncio complains when a client of NATS closes"


def test_the_page_has_an_example_for_each_client() -> None:
    assert [kind for kind, _ in EXAMPLES] == [
        "sh", "python", "python", "python", "python", "python", "python", "node", "go",
    ]  # fmt: skip
    for package in ("openai", "anthropic", "langchain_openai", "litellm", "nats"):
        assert any(f"import {package}" in text or f"from {package}" in text for _, text in EXAMPLES)


def test_the_environment_is_that_of_the_pins() -> None:
    """A package left behind by older pins would be tried in place of the pinned one."""
    pins = (ROOT / "infra" / "clients" / "requirements.txt").read_text()
    wanted = dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", pins, re.MULTILINE))
    listed = subprocess.run(
        [PYTHON, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    found = {
        one["name"].lower().replace("_", "-"): one["version"] for one in json.loads(listed.stdout)
    }
    for name, version in wanted.items():
        assert found.get(name.lower().replace("_", "-")) == version, name
