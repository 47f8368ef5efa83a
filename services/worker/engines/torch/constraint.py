"""Holds structured output to its format: which tokens may come next, by llguidance's automata."""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import llguidance
import numpy as np
import torch
from torch import Tensor

from services.worker.engine import RefusedError
from services.worker.engines.grammars import Grammars, failure
from shared.structured import Structured

# The longest that a load, and others with it, waits for its format to be compiled.
LOAD_WAIT_S = 0.02
# CPU time of one step of one output, beyond which its request fails. Usual ones take 15 ms at most.
STEP_S = 0.1


class Constraint:
    """The format of one output, as far as it is written."""

    def __init__(self, compiled: Future[llguidance.LLMatcher | str], ends: Collection[int]) -> None:
        self._compiled, self._ends = compiled, ends
        self._slow = ""

    def ready(self, within_s: float = 0.0) -> bool:
        """True once the format is compiled, or cannot be."""
        return bool(wait((self._compiled,), within_s).done)

    @property
    def failed(self) -> str:
        """Why the format can be held no longer; empty while it can, and until it is ready."""
        if self._slow or not self.ready():
            return self._slow
        matcher = self._compiled.result()
        return matcher if isinstance(matcher, str) else failure(matcher)

    def hold(self, logits: Tensor) -> None:
        """Rule out, in place in a row of logits, the tokens that may not come next. If none is left
        (`min_tokens` forbids the end of a complete output), the format wins.
        """
        matcher = self._compiled.result()
        if isinstance(matcher, str) or matcher.is_error():
            return
        began_s = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        self._took(began_s)
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        mask = torch.zeros(len(logits), dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed)
        mask = mask.to(logits.device)
        if bool(torch.isinf(logits[mask]).all()):
            logits[mask] = 0.0
        logits.masked_fill_(~mask, -torch.inf)

    def take(self, tokens: Sequence[int]) -> None:
        """Go on past tokens of the output."""
        matcher = self._compiled.result()
        if not isinstance(matcher, str):
            began_s = time.thread_time()
            _consume(matcher, tokens, self._ends)
            self._took(began_s)

    def _took(self, began_s: float) -> None:
        if time.thread_time() - began_s > STEP_S:
            self._slow = f"the format cannot be held: a token takes more than {STEP_S:g} s"


class Constraints:
    """The formats that a vocabulary can write, compiled one at a time beside the engine."""

    def __init__(self, folder: Path, vocabulary: int, ends: Collection[int]) -> None:
        """`vocabulary`: the number of the model's logits. `ends`: tokens that end an output."""
        self._ends = frozenset(ends)
        self._grammars = Grammars(folder, vocabulary, ends)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._newest: Constraint | None = None

    def start(self, wanted: Structured, written: Sequence[int]) -> Constraint:
        """The format of an output that begins with `written`. It may not be ready yet. Raises
        RefusedError for a format that cannot be compiled, where that shows at once.
        """
        waits = self._newest is None or self._newest.ready()
        constraint = Constraint(self._pool.submit(self._compile, wanted, written), self._ends)
        self._newest = constraint
        if waits and constraint.ready(LOAD_WAIT_S) and constraint.failed:
            raise RefusedError(constraint.failed)
        return constraint

    def _compile(self, wanted: Structured, written: Sequence[int]) -> llguidance.LLMatcher | str:
        matcher = self._grammars.compile(wanted)
        if not isinstance(matcher, str):
            _consume(matcher, written, self._ends)
        return matcher


def _consume(matcher: llguidance.LLMatcher, tokens: Sequence[int], ends: Collection[int]) -> None:
    """Go on past tokens of the output. Its end is no part of the format."""
    if tokens and tokens[-1] in ends:
        tokens = tokens[:-1]
    matcher.consume_tokens(list(tokens))
