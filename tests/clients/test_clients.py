"""Tests of a fleet by packages that users have: langchain-openai, litellm, openai and others."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.models.shipped import DEFAULT
from tests.clients.environment import FOLDER, PYTHON, run

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make test-clients` makes its environment"
)
on_one_loop = pytest.mark.asyncio(loop_scope="module")
HERE = Path(__file__).parent
MODEL = "sim-Llama-3-8B"
CALLS = [{"name": "temperature", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
JOKE = {"setup": "Why do cats purr?", "punchline": "They know."}


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


SCRIPT = [
    {"prompt": "The function returned: 19", "say": "It is 4 °C in Oslo, and 19 °C in Rome."},
    {"prompt": "How warm is it in Oslo", "say": json.dumps(CALLS)},
    # what the judges ask for
    {"prompt": "What is 3 + 4", "say": call("my_adder_tool", a=3, b=4)},
    {"prompt": "The function returned:", "say": "It is sunny."},
    {"prompt": "magic_function_no_args()", "say": call("magic_function_no_args")},
    {"prompt": "user\nHello!", "say": call("magic_function", input=3)},
    {"prompt": "magic_function(3)", "say": call("magic_function", input=3)},
    {"prompt": "a Pirate greeting", "say": call("greeting_generator", answer_style="Pirate")},
    {"prompt": "in San Francisco", "say": call("get_weather", location="San Francisco")},
    {"prompt": "你好", "say": call("unicode_customer", customer_name="你好啊集团", description="")},
    {"prompt": "こん", "say": call("unicode_customer", customer_name="こんにちは", description="")},
    {"prompt": '"name": "JokeDict"', "say": call("JokeDict", **JOKE)},
    {"prompt": '"name": "Joke"', "say": call("Joke", **JOKE)},
    {"say": "Yes."},
]
MOST_REQUESTS_S = 30  # how long guidellm asks
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
THEIR_CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"
OPENRESPONSES = FOLDER / "openresponses"


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
@pytest.mark.parametrize("package", ["openai", "langchain", "litellm", "anthropic"])
async def test_a_loop_of_tools_ends_in_the_answer(fleet: Fleet, package: str) -> None:
    script = HERE / f"tool_loop_{package}.py"
    assert (await run([PYTHON, script, f"{fleet.http_url}/v1", MODEL])).endswith("ok\n")


async def langchain(fleet: Fleet, method: str, model: str, folder: Path, *chosen: str) -> str:
    """The output of LangChain's standard tests of chat models."""
    settings = {"BASE_URL": f"{fleet.http_url}/v1", "MODEL": model, "METHOD": method}
    tests = HERE / "langchain_standard.py"
    pytest_of_theirs = [PYTHON, "-m", "pytest", "-q", "-rs", "--noconftest", "-c", "/dev/null"]
    options = ["--rootdir", folder, "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    options += ["-o", "asyncio_default_test_loop_scope=session"]  # the client keeps connections
    return await run([*pytest_of_theirs, *options, *chosen, tests], settings)


@on_one_loop
async def test_langchains_standard_tests_pass(fleet: Fleet, tmp_path: Path) -> None:
    said = await langchain(fleet, "function_calling", MODEL, tmp_path)
    assert int(said.rpartition(" passed")[0].rpartition("\n")[2]) >= 30, said


@on_one_loop
async def test_langchains_standard_tests_of_structured_output_pass_on_a_real_model(
    tmp_path: Path,
) -> None:
    async with Fleet(FleetSpec(engine="torch", replicas=1, drain_s=2.0)) as fleet:
        # each asks several times; one more has a schema that allows the model further keys
        chosen = ("-k", "test_structured_output and not async and not v1 and not optional")
        said = await langchain(fleet, "json_schema", DEFAULT, tmp_path, *chosen)
    assert "3 passed" in said, said


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


@on_one_loop
@pytest.mark.parametrize(("vendor", "prefix"), [("openai", "/v1"), ("anthropic", "")])
async def test_answers_and_streams_have_the_form_of_the_vendors_own_document(
    fleet: Fleet, tmp_path: Path, vendor: str, prefix: str
) -> None:
    url, document, report = f"{fleet.http_url}{prefix}", tmp_path / "document.json", tmp_path / "r"
    await run([PYTHON, HERE / "vendor_specs.py", vendor, url, MODEL, document])
    await run(
        [
            PYTHON.parent / "schemathesis",
            "run",
            document,
            *("--url", url, "--checks", THEIR_CHECKS, "--mode", "positive"),
            *("--phases", "examples,fuzzing", "--max-examples", "20", "--seed", "1"),
            *("--no-color", "--request-timeout", "120"),
            *("--report", "ndjson", "--report-ndjson-path", report),
        ]
    )
    assert report.read_text().count('"status_code":200') > 30, "most were refused"


@on_one_loop
async def test_responses_pass_openresponses_suite_but_for_its_image(fleet: Fleet) -> None:
    scripts = sorted(OPENRESPONSES.glob("*/compliance-test.ts"))
    if not scripts:
        pytest.skip("`make test-clients` could not clone openresponses/openresponses from GitHub")
    bun = FOLDER / "js" / "node_modules" / ".bin" / "bun"
    asked = ["--base-url", f"{fleet.http_url}/v1", "--api-key", "none", "--model", MODEL]
    # it exits with 1, since its image is refused
    command = ["bash", "-c", '"$@" || true', "-", bun, scripts[0], *asked]
    said = re.sub(r"\x1b\[\d+m", "", await run(command, folder=OPENRESPONSES))
    outcomes = re.findall(r"^([✓✗]) ([A-Z][\w -]*\w)", said, re.MULTILINE)
    assert [name for mark, name in outcomes if mark == "✗"] == ["Image Input"], said
    assert len(outcomes) >= 6, said
