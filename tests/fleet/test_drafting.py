"""Tests of a live fleet under `adaserve` with a draft model: outputs are those without drafts."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.bus.api import Call
from shared.core.worker.step import Load, Work
from shared.models import shipped
from shared.perf.draft import DRAFT
from shared.schemas import Announce, Sampling
from shared.telemetry import conventions as names
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot
from tests.fleet.live import WAIT_S

WORDS = ("river", "house", "tree", "light", "stone", "walk")
OUTPUT = 24
ASKED: list[dict[str, Any]] = [
    {"prompt": f"<|im_start|>user\nWhat is a {word}?<|im_end|>\n<|im_start|>assistant\n"}
    | ({"temperature": 0.0} if n % 2 else {"temperature": 0.7, "seed": n})
    for n, word in enumerate(WORDS)
]


def without_drafts(output: int, *, ignore_eos: bool = False) -> list[str]:
    """The texts that the model answers in one engine, without a draft model."""
    from services.worker.engines.torch.engine import TorchEngine

    folder = shipped.folder(shipped.DEFAULT)
    tokenizer, engine = (
        Tokenizer.load(folder),
        TorchEngine(folder, profile="cpu-tiny", device="cpu"),
    )
    ends = frozenset[int]() if ignore_eos else tokenizer.eos_token_ids
    texts = []
    for asked in ASKED:
        prompt = tokenizer.encode(asked["prompt"])
        sampling = Sampling(temperature=asked["temperature"], ignore_eos=ignore_eos)
        engine.load(Load(Slot(0), prompt, 0, sampling, asked.get("seed", 0)))
        tokens, work = list[int](), Work(Slot(0), len(prompt), True)
        while len(tokens) < output and not ends.intersection(tokens):
            tokens += engine.execute([work], None).done[0].tokens
            work = Work(Slot(0), 1, True)
        engine.release(Slot(0))
        texts.append(tokenizer.inner.decode(tokens[:output]))
    return texts


async def learned(fleet: Fleet) -> Announce:
    """The first announcement that says which drafts were accepted."""
    found: asyncio.Future[Announce] = asyncio.get_running_loop().create_future()

    def on_announce(announce: Announce, _: Call) -> None:
        if announce.draft_yields and not found.done():
            found.set_result(announce)

    async with fleet.connect("slackline-test") as bus, asyncio.timeout(WAIT_S):
        await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, on_announce)
        return await found


def counts_on(page: str) -> list[float]:
    """Drafts, their tokens, and those accepted, on a worker's page of metrics."""
    return [
        sum(
            float(value) for value in re.findall(rf"^{name}{{.*}} ([0-9.e+]+)$", page, re.MULTILINE)
        )
        for name in (names.DRAFTS, names.DRAFT_TOKENS, names.ACCEPTED_TOKENS)
    ]


@pytest.mark.slow
async def test_adaserve_answers_with_the_shipped_pair_as_without_drafts() -> None:
    pytest.importorskip("torch")
    spec = FleetSpec(
        replicas=1,
        engine="torch",
        profile="cpu-tiny",
        policy="adaserve",
        settings={"budget_tokens": "24"},
        metrics=True,
        drain_s=2.0,
    )
    async with Fleet(spec) as fleet, httpx.AsyncClient(timeout=WAIT_S) as http:

        async def complete(asked: dict[str, Any]) -> str:
            body = asked | {"model": shipped.DEFAULT, "max_tokens": OUTPUT}
            answer = await http.post(f"{fleet.http_url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        texts = await asyncio.gather(*map(complete, ASKED))
        page = (await http.get(fleet.metrics["worker-r1"])).text
        announced = await learned(fleet)
    assert texts == without_drafts(OUTPUT)
    counts = counts_on(page)
    print(counts)
    assert counts[0] > 0
    assert counts[1] >= counts[2] > 0
    step, read = announced.draft  # type: ignore[misc]
    assert 0 < step <= 1 and 0 < read <= 1 and announced.draft != (DRAFT, DRAFT)
    assert announced.draft_kv_blocks > announced.kv_blocks
    for each in announced.draft_yields:
        assert each.verifications > 0 and 0 < each.accepted[0] <= 1
