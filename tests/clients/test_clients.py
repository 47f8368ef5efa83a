"""Tests of a fleet by packages that users have: langchain-openai, litellm, openai and others."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.clients.environment import PYTHON, run

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make test-clients` makes its environment"
)
on_one_loop = pytest.mark.asyncio(loop_scope="module")
HERE = Path(__file__).parent
MODEL = "sim-Llama-3-8B"
CALLS = [{"name": "temperature", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
SCRIPT = [
    {"prompt": "The function returned: 19", "say": "It is 4 °C in Oslo, and 19 °C in Rome."},
    {"prompt": "How warm is it in Oslo", "say": json.dumps(CALLS)},
    {"say": "Yes."},
]
MOST_REQUESTS_S = 30  # how long guidellm asks
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    environment = {"SLACKLINE_WORKER_SCRIPT": str(script)}
    async with Fleet(FleetSpec(pace=0.1, drain_s=2.0, environment=environment)) as fleet:
        yield fleet
        assert [c.name for c in fleet.processes if c.starts != 1] == [], (
            "a client's messages ended a service"
        )


@on_one_loop
@pytest.mark.parametrize("package", ["openai", "langchain", "litellm"])
async def test_a_loop_of_tools_ends_in_the_answer(fleet: Fleet, package: str) -> None:
    script = HERE / f"tool_loop_{package}.py"
    assert (await run([PYTHON, script, f"{fleet.http_url}/v1", MODEL])).endswith("ok\n")


@on_one_loop
async def test_guidellm_meets_no_error(fleet: Fleet, tmp_path: Path) -> None:
    tokenizer = HERE.parent.parent / "shared" / "models" / "slackline-5m"
    report = tmp_path / "report.json"
    await run(
        [
            PYTHON.parent / "guidellm",
            "run",
            "--disable-console-interactive",
            *("--backend", f"kind=openai_http,target={fleet.http_url}"),
            *("--profile", "kind=constant,rate=4"),
            *("--constraint", f"kind=max_duration,seconds={MOST_REQUESTS_S}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={report}"),
        ],
        {"GUIDELLM__MAX_WORKER_PROCESSES": "1"},  # each loads torch
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0, totals
    assert totals["successful"] > MOST_REQUESTS_S / 2


@on_one_loop
async def test_schemathesis_finds_the_document_true(fleet: Fleet) -> None:
    await run(
        [
            PYTHON.parent / "schemathesis",
            "run",
            f"{fleet.http_url}/openapi.json",
            *("--checks", f"{CHECKS},response_schema_conformance"),
            *("--max-examples", "10", "--seed", "1", "--no-color"),
            *("--request-timeout", "120"),
        ]
    )
