"""Tests of the trial of a request's format: one that takes too long is refused soon enough."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("llguidance")

from services.worker.grammar_trial import GrammarTrial, What
from shared.models import shipped
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured
from shared.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

WITHIN_S = 300.0  # the longest that a busy machine may take for anything


def schema(value: Any) -> JsonSchema:
    return JsonSchema(schema=json.dumps(value))


def patterns(k: int) -> JsonSchema:
    return schema({"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(k)]})


AMBIGUOUS = " | ".join("e " * n for n in range(1, 30))
# what multiplies, and whether it is refused: the others cost little
FORMATS: dict[str, tuple[Structured, bool]] = {
    "a divisor": (schema({"type": "integer", "multipleOf": 99999989}), True),
    "patterns at once": (patterns(30), True),
    "expressions at once": (
        Grammar(ebnf="start: T\nT: " + " & ".join(f"/(.|\\n)*a{i}(.|\\n)*/" for i in range(30))),
        True,
    ),
    "alternatives of itself": (Grammar(ebnf=f"start: e\ne: {AMBIGUOUS} | /[a-z ]/\n"), True),
    "objects at once": (
        schema(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        ),
        True,
    ),
    "nested parentheses": (Regex(pattern="(" * 4000 + "a" + ")" * 4000), True),
    "nested arrays": (JsonSchema(schema='{"items":' * 6000 + "{}" + "}" * 6000), True),
    "lengths": (schema({"type": "string", "minLength": 10**6, "maxLength": 10**7}), False),
    "counts": (Regex(pattern="(((a{1,100}){1,100}){1,100}){1,100}"), False),
    "memory of an expression": (Regex(pattern="(.*a.{200})+"), False),
    "an object": (JsonObject(), False),
    "a choice": (Choice(options=[f"option {i}" for i in range(256)]), False),
}


async def told(trial: GrammarTrial, wanted: Structured) -> str:
    """The answer, which a busy machine may give only when asked again."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                return await trial.refusal(wanted)
            except TimeoutError:
                await asyncio.sleep(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trial() -> AsyncIterator[GrammarTrial]:
    folder = shipped.folder(shipped.DEFAULT)
    tokenizer = Tokenizer.load(folder)
    ends = sorted(tokenizer.eos_token_ids)
    trial = GrammarTrial(What("llguidance", str(folder), tokenizer.vocabulary, ends))
    trial.start()
    yield trial
    await trial.close()


@pytest.mark.parametrize("name", FORMATS)
async def test_what_multiplies_is_refused_or_costs_little(trial: GrammarTrial, name: str) -> None:
    wanted, refused = FORMATS[name]
    words = await told(trial, wanted)
    assert bool(words) == refused, words
    assert len(words) <= 1000


async def test_an_answer_is_remembered_and_many_questions_are_turned_away(
    trial: GrammarTrial,
) -> None:
    known, _ = FORMATS["a divisor"]
    words = await told(trial, known)
    asked = [
        asyncio.ensure_future(
            trial.refusal(schema({"type": "integer", "multipleOf": 99999989 + n}))
        )
        for n in range(1, 30)
    ]
    await asyncio.sleep(0)
    assert await trial.refusal(known) == words, "it waits for none of them"
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert any("too many" in str(end) for end in ends)
    assert all(end or isinstance(end, TimeoutError) for end in ends), "none was taken"


async def test_a_trial_whose_process_was_killed_goes_on(trial: GrammarTrial) -> None:
    assert trial.pid is not None
    os.kill(trial.pid, signal.SIGKILL)
    assert await told(trial, Choice(options=["yes", "no"])) == ""
