"""Compiles formats of structured output by llguidance, within limits: for engines and trials."""

from collections.abc import Collection
from pathlib import Path
from typing import assert_never

import llguidance
import msgspec

from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured

ANY_OBJECT = '{"type": "object"}'
# between two tokens of JSON: without a bound a model may write it for ever
WHITE_SPACE = r"\n? {0,16}"
# The items of one mask, and the states of one output. With 20,000 items a mask of an ambiguous
# grammar takes 0.6 s at most, and with the library's own 50,000 it takes 2.3 s. An object with 200
# optional properties and a vocabulary of 128,000 tokens needs 15,000. A state is about 1 KB.
LIMITS = llguidance.LLParserLimits(step_max_items=20_000, max_lexer_states=100_000)


class Grammars:
    """The formats that a model's vocabulary can write."""

    def __init__(self, folder: Path, vocabulary: int, ends: Collection[int]) -> None:
        """`vocabulary`: the number of the model's logits. `ends`: tokens that end an output."""
        self._tokenizer = llguidance.LLTokenizer(
            str(folder / "tokenizer.json"), n_vocab=vocabulary, eos_token=sorted(ends)
        )

    def compile(self, wanted: Structured) -> llguidance.LLMatcher | str:
        """The matcher of an output, or why there is none. Compiling lets other threads run."""
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            return f"the format cannot be compiled: {error}"
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        return failure(matcher) or matcher


def failure(matcher: llguidance.LLMatcher) -> str:
    """Why the output can no longer be held to its format; empty while it can."""
    # the library's own state follows in angle brackets
    error: str = matcher.get_error().partition("<state>")[0].strip()
    return f"the format cannot be held: {error}" if error else ""


def _grammar(wanted: Structured) -> str:
    match wanted:
        case JsonSchema(schema=schema):
            return _of_schema(schema)
        case JsonObject():
            return _of_schema(ANY_OBJECT)
        case Regex(pattern=pattern):
            return llguidance.grammar_from("regex", pattern)
        case Choice(options=options):
            return llguidance.grammar_from("choice", msgspec.json.encode(options).decode())
        case Grammar(ebnf=ebnf):
            return llguidance.grammar_from("ebnf", ebnf)
        case _:
            assert_never(wanted)


def _of_schema(schema: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema, {"whitespace_pattern": WHITE_SPACE}
    )
