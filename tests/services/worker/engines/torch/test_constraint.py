"""Tests of structured output in the torch engine: every output keeps to its request's format."""

import json
import re
from collections.abc import Iterator
from random import Random

import pytest

from services.worker.engine import RefusedError
from shared.core.worker.step import Load, Work
from shared.models import shipped
from shared.schemas import Sampling
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

pytest.importorskip("torch")

from services.worker.engines.torch.engine import TorchEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMATS: dict[str, Structured] = {
    "schema": JsonSchema(schema=json.dumps(SCHEMA)),
    "regex": Regex(pattern="[a-c]{3}-[0-9]{2}"),
    "choice": Choice(options=["yes", "no", "perhaps"]),
    "grammar": Grammar(ebnf='root ::= item ("," item)?\nitem ::= "x" [0-9]'),
    "short object": JsonSchema(schema='{"type": "object", "maxProperties": 0}'),
}
TOKENIZER = Tokenizer.load(shipped.folder(shipped.DEFAULT))
PROMPT = TOKENIZER.encode("What is a river?")
LONGEST = 200  # tokens


@pytest.fixture(scope="module")
def engines() -> TorchEngine:
    return TorchEngine(shipped.folder(shipped.DEFAULT), profile="cpu", device="cpu")


@pytest.fixture
def engine(engines: TorchEngine) -> Iterator[TorchEngine]:
    yield engines
    engines.close()


def fits(wanted: Structured, text: str) -> bool:
    """Tells whether the text keeps to the format."""
    match wanted:
        case JsonSchema(schema=schema):
            value = json.loads(text)
            if json.loads(schema) == SCHEMA:
                return value["city"] in ("Oslo", "Rome") and 1 <= value["days"] <= 9
            return value == {}
        case JsonObject():
            return isinstance(json.loads(text), dict)
        case Regex(pattern=pattern):
            return re.fullmatch(pattern, text) is not None
        case Choice(options=options):
            return text in options
        case Grammar():
            return re.fullmatch(r"x\d(,x\d)?", text) is not None


def written(engine: TorchEngine, sampling: Sampling, seed: int, moves: Random) -> list[int]:
    """The output up to its end. The request is preempted, and moved to a new slot, now and then."""
    tokens: list[int] = []
    slot, computed = Slot(0), 0
    engine.load(Load(slot, PROMPT, 0, sampling, seed))
    while len(tokens) < LONGEST:
        left = len(PROMPT) + len(tokens) - computed
        (done,) = engine.execute([Work(slot, left, True)], None).done
        assert not done.failed
        computed += done.computed  # none while the format is still compiled
        tokens += done.tokens
        if tokens and tokens[-1] in TOKENIZER.eos_token_ids:
            engine.release(slot)
            return tokens[:-1]
        match moves.randrange(6):
            case 0:
                engine.preempt(slot)
                computed = 0
            case 1:
                engine.release(slot)
                slot, computed = Slot(slot + 1), 0
                engine.load(Load(slot, [*PROMPT, *tokens], len(tokens), sampling, seed))
    raise AssertionError(f"seed {seed}: it never ended: {text_of(tokens)}")


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENIZER.piece(token) for token in tokens).decode()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_an_output_has_its_format(engine: TorchEngine, name: str, temperature: float) -> None:
    wanted = FORMATS[name]
    for seed in range(6):
        sampling = Sampling(structured=wanted, temperature=temperature)
        tokens = written(engine, sampling, seed, Random(seed))
        assert fits(wanted, text_of(tokens)), (seed, text_of(tokens))


def test_moves_do_not_change_what_is_written(engine: TorchEngine) -> None:
    class Never(Random):
        def randrange(self, *_: int) -> int:  # type: ignore[override]
            return 5

    for seed in range(5):
        sampling = Sampling(structured=FORMATS["schema"], temperature=1.0)
        at_rest = written(engine, sampling, seed, Never())
        assert at_rest == written(engine, sampling, seed, Random(seed)), seed


def test_the_format_wins_over_min_tokens(engine: TorchEngine) -> None:
    sampling = Sampling(structured=FORMATS["choice"], min_tokens=50, max_tokens=60)
    assert text_of(written(engine, sampling, 1, Random(1))) in ("yes", "no", "perhaps")


@pytest.mark.parametrize(
    "wrong",
    [
        JsonSchema(schema='{"type": "river"}'),
        Regex(pattern="a(?=b)"),
        Regex(pattern="("),
        Grammar(ebnf="root ::= ("),
    ],
    ids=["schema", "look-ahead", "parenthesis", "grammar"],
)
def test_a_format_that_cannot_be_compiled_is_refused(
    engine: TorchEngine, wrong: Structured
) -> None:
    with pytest.raises(RefusedError, match="format"):
        engine.load(Load(Slot(0), PROMPT, 0, Sampling(structured=wrong), 1))
    assert 0 not in engine.snapshot().slots


def test_an_output_that_left_its_format_is_refused(engine: TorchEngine) -> None:
    tokens = [*PROMPT, *TOKENIZER.encode("maybe")]
    sampling = Sampling(structured=FORMATS["choice"])
    with pytest.raises(RefusedError, match="format"):
        engine.load(Load(Slot(0), tokens, len(tokens) - len(PROMPT), sampling, 1))
