"""Tests of live fleets with several models: each request is answered by its own."""

import asyncio
import contextlib
import io
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from loadgen.cli.main import main
from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.api import RefusedError
from shared.errors import BusError
from shared.models import shipped
from tests.fleet.api.scripted import client_of as openai_of
from tests.fleet.api.test_batches import begin, ended, line, results
from tests.fleet.live import WAIT_S, ask, client_of, request_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
RETURN_S = 5.0
MODELS = {"small": "h100-llama3-8b", "large": "a100-llama3-70b-tp4", "spare": "a100-qwen-14b"}
TIERS = """
return_s = {return_s}
[aliases]
best = "{best}"
[tiers.chat]
slo = {{ ttft_s = 5.0, tbt_s = 1.0 }}
models = {{ large = {{ ttft_s = 50.0, tbt_s = 10.0 }} }}
[tiers.batch]
slo = {{ ttlt_s = 3600 }}
"""
ONE_WORD: dict[str, Any] = {"prompt": "A river is", "max_tokens": 2}


def configuration(best: str) -> str:
    text = TIERS.format(return_s=RETURN_S, best=best)
    first, _, rest = text.lstrip().partition("\n")
    return f"{rest}\n[admission]\n{first}\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("configured") / "slackline.toml"
    file.write_text(configuration("large"))
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(file: Path) -> AsyncIterator[Fleet]:
    spec = FleetSpec(
        replicas=1,
        models=MODELS,
        pace=0.05,
        drain_s=2.0,
        metrics=True,
        environment={"SLACKLINE_CONFIG": str(file)},
    )
    async with Fleet(spec) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_of(fleet) as client:
        yield client


async def replica_of(fleet: Fleet, model: str) -> str:
    async with client_of(fleet) as (_, client, _):
        verdict = (await ask(client, request_for(2, model=model))).verdict
        assert verdict is not None
        assert verdict.finish_reason == "length", verdict
        return str(verdict.replica)


async def test_the_models_are_listed_and_each_answers_for_itself(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    listed: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(WAIT_S):  # a gateway hears of a new model within a second
        while sorted(listed) != ["best", "large", "small", "spare"]:
            models = (await client.models.list()).data
            listed = {model.id: model.model_extra or {} for model in models}
    assert listed["best"]["root"] == "large"
    assert all(extra["max_model_len"] == 8192 for extra in listed.values())
    assert [await replica_of(fleet, name) for name in MODELS] == ["r1", "r2", "r3"]
    answer = await client.completions.create(model="best", **ONE_WORD)
    assert answer.model == "best"


async def test_a_request_that_names_none_or_a_wrong_one_is_told_which_there_are(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="`large`, `small`, `spare`") as unknown:
        await client.completions.create(model="tiny", **ONE_WORD)
    assert unknown.value.code == "model_not_found"
    async with httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S) as http:
        for path in ("/v1/completions", "/tokenize"):
            answer = await http.post(path, json={"prompt": "hi"})
            assert answer.status_code == 400, answer.text
            assert "`large`, `small`, `spare`" in answer.json()["error"]["message"]
        named = await http.post("/tokenize", json={"prompt": "hi", "model": "small"})
        assert named.json()["count"] == 2
    async with client_of(fleet) as (_, nats, _):
        with pytest.raises(RefusedError, match="there are several models"):
            await nats.submit(request_for(2), "chat")


async def test_a_tier_has_the_slo_that_it_names_for_the_model(fleet: Fleet) -> None:
    async with client_of(fleet) as (_, client, _):
        for model, ttft_s in (("small", 5.0), ("large", 50.0)):
            one = request_for(2, model=model)
            await ask(client, one)
            explained = await asyncio.to_thread(
                printed, fleet, "explain", one.request_id, "--operator"
            )
            assert (explained["model"], explained["slo"]["ttft_s"]) == (model, ttft_s)


def printed(fleet: Fleet, *words: str) -> Any:
    """The JSON that a command prints, as the operator."""
    out, access = io.StringIO(), fleet.access()
    at = ("--url", access.url, "--creds", access.creds, "--tls-ca", access.tls_ca)
    with contextlib.redirect_stdout(out):
        main([*words, "--json", *at])
    return json.loads(out.getvalue())


async def test_status_and_metrics_tell_the_models_apart(fleet: Fleet) -> None:
    for model in MODELS:
        await replica_of(fleet, model)
    status = await asyncio.to_thread(printed, fleet, "status")
    assert [replica["model"] for replica in status["fleet"]["replicas"]] == list(MODELS)
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        text = (await http.get(fleet.metrics["admission"])).text
    for model in MODELS:
        assert f'slackline_offered_total{{model_name="{model}",tier="chat"}}' in text


async def test_each_line_of_a_batch_has_its_own_model(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    lines = [line(n, model=model) for n, model in enumerate(("small", "best", "tiny"))]
    batch = await ended(client, await begin(client, lines))
    good = await results(client, batch.output_file_id)
    assert {one["custom_id"]: one["response"]["body"]["model"] for one in good} == {
        "c0": "small",
        "c1": "best",
    }
    (bad,) = await results(client, batch.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("c2", 404)


async def test_an_alias_is_moved_while_requests_run_and_none_fails(
    fleet: Fleet, file: Path
) -> None:
    replicas: list[str] = []
    moved = asyncio.Event()

    async def callers() -> None:
        async with client_of(fleet) as (_, client, _):
            while not moved.is_set():
                many = [ask(client, request_for(20, model="best")) for _ in range(8)]
                for one in await asyncio.gather(*many):
                    assert one.verdict is not None
                    assert one.verdict.finish_reason == "length"
                    replicas.append(str(one.verdict.replica))

    calling = asyncio.create_task(callers())
    async with asyncio.timeout(WAIT_S):
        while len(replicas) < 16:
            await asyncio.sleep(0.05)
        file.write_text(configuration("small"))
        while replicas[-1] != "r1":
            await asyncio.sleep(0.05)
            assert not calling.done(), calling.result()
        moved.set()
        await calling
    assert set(replicas) == {"r1", "r2"}


async def test_a_model_joins_and_another_leaves_a_fleet_that_runs(fleet: Fleet) -> None:
    """The worker of `spare` is started again with a model that nobody has heard of."""
    worker = fleet.process("worker-r3")
    starts = {name: fleet.process(name).starts for name in ("admission", "planner", "gateway")}
    async with client_of(fleet) as (_, client, _), asyncio.timeout(WAIT_S):
        worker.environment["SLACKLINE_WORKER_MODEL"] = "fresh"
        worker.kill()
        waits = asyncio.create_task(ask(client, request_for(2, model="spare")))
        while True:
            try:
                assert await replica_of(fleet, "fresh") == "r3"
                break
            except (RefusedError, BusError):  # it is not there yet, or a busy machine is slow
                await asyncio.sleep(0.2)
        verdict = (await waits).verdict
        assert verdict is not None
        assert verdict.message == "No replica serves the model `spare` any more"
        with pytest.raises(RefusedError, match="unknown model `spare`"):
            await client.submit(request_for(2, model="spare"), "chat")
    assert {name: fleet.process(name).starts for name in starts} == starts


async def test_a_request_stays_with_its_model_when_its_replica_dies(fleet: Fleet) -> None:
    async with client_of(fleet) as (_, client, wire), asyncio.timeout(WAIT_S):
        running = asyncio.create_task(ask(client, request_for(1500, model="small")))
        await wire.until_speaking(1)
        fleet.process("worker-r1").kill()
        verdict = (await running).verdict
        assert verdict is not None
        assert (verdict.finish_reason, verdict.replica) == ("length", "r1")
        assert verdict.attempts > 1


# ---------------------------------------------------------------- real models


async def test_each_real_model_has_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    """Admission is told of one folder; that of the other, beside it, its worker names."""
    pytest.importorskip("torch")
    plain, terse = tmp_path / "plain", tmp_path / "terse"
    shutil.copytree(shipped.folder("slackline-5m"), plain)
    shutil.copytree(shipped.folder("slackline-draft"), terse)
    template = (terse / "chat_template.jinja").read_text()
    (terse / "chat_template.jinja").write_text("You are terse. Very terse. " + template)
    spec = FleetSpec(
        replicas=1,
        engine="torch",
        models={"plain": str(plain), "terse": str(terse)},
        drain_s=2.0,
        environment={"SLACKLINE_ADMISSION_MODELS": f"plain={plain}"},
    )
    chat = {"messages": [{"role": "user", "content": "What is a river?"}], "max_tokens": 4}
    async with Fleet(spec) as fleet, httpx.AsyncClient(timeout=WAIT_S) as http:
        read = {}
        for model in spec.models:
            answer = await http.post(
                f"{fleet.http_url}/v1/chat/completions", json={"model": model, **chat}
            )
            assert answer.status_code == 200, answer.text
            read[model] = answer.json()["usage"]["prompt_tokens"]
        assert read["terse"] > read["plain"] + 4
        assert "tokenizer.read" in fleet.process("admission").output()
