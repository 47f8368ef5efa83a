"""Structured output: which tokens may come next, by llguidance's automata."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import assert_never

import llguidance
import msgspec
import numpy as np
import torch
from torch import Tensor

from services.worker.engine import RefusedError
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured

ANY_OBJECT = '{"type": "object"}'
# between two tokens of JSON: without a bound a model may write it for ever
WHITE_SPACE = r"\n? {0,16}"


class Constraint:
    """The format of one output, as far as it is written."""

    def __init__(self, matcher: llguidance.LLMatcher, ends: Collection[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    @property
    def failed(self) -> str:
        """Why the format can be held no longer; empty while it can."""
        # the library's own state follows in angle brackets
        return self._matcher.get_error().partition("<state>")[0].strip()

    def hold(self, logits: Tensor) -> None:
        """Take from one row of logits, in place, every token that may not come next. Where none of
        the others is left (`min_tokens` forbids the end of an output that is complete), the format
        wins.
        """
        if self._matcher.is_error():
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        mask = torch.zeros(len(logits), dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed)
        mask = mask.to(logits.device)
        if bool(torch.isinf(logits[mask]).all()):
            logits[mask] = 0.0
        logits.masked_fill_(~mask, -torch.inf)

    def take(self, tokens: Sequence[int]) -> None:
        """Go on past tokens of the output. Its end is no part of the format."""
        if tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        self._matcher.consume_tokens(list(tokens))


class Constraints:
    """The formats that a model's vocabulary can write."""

    def __init__(self, folder: Path, vocabulary: int, ends: Collection[int]) -> None:
        """`vocabulary`: the number of the model's logits. `ends`: tokens that end an output."""
        self._ends = frozenset(ends)
        self._tokenizer = llguidance.LLTokenizer(
            str(folder / "tokenizer.json"), n_vocab=vocabulary, eos_token=sorted(ends)
        )

    def start(self, wanted: Structured, written: Sequence[int]) -> Constraint:
        """The format of an output that begins with `written`. Raises RefusedError for a format that
        cannot be compiled.
        """
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            raise RefusedError(f"the format cannot be compiled: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        constraint = Constraint(matcher, self._ends)
        constraint.take(written)
        if constraint.failed:
            raise RefusedError(f"the format cannot be held: {constraint.failed}")
        return constraint


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
