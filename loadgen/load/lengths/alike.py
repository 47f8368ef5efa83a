"""Workloads whose prompts begin alike: sessions, tool loops, documents, one system prompt for all.
All figures are choices of ours: they stand for no dataset.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from loadgen.load.lengths.laws import REDRAWS, Law, Lengths, TruncatedLognormal
from shared.errors import ConfigError
from shared.prefix import Piece

SYSTEM = 0  # the id of the one system prompt, as a piece of prompts


@dataclass(frozen=True, slots=True)
class Growing:
    """A session whose prompts grow. Each is all that was said before and something new: a question,
    or a tool's result. All sessions begin with one system prompt. `pause_s`: the mean; pauses are
    exponential. A session ends before a round that the context cannot hold.
    """

    application: str
    system_tokens: int
    first: Law
    news: Law  # of each later round
    output: Law
    rounds: tuple[int, int]  # the least and the most, as likely
    pause_s: float = 0.0

    def draw(self, rng: Random, context_tokens: int) -> Lengths:
        """Draw a session. Raises ConfigError if no first round ever fits."""
        for _ in range(REDRAWS):
            own = rng.getrandbits(60)
            pieces = [Piece(SYSTEM, self.system_tokens), Piece(own, self.first.at(rng.random()))]
            found: list[Lengths] = []
            for turn in range(rng.randint(*self.rounds)):
                prompt, output = sum(n for _, n in pieces), self.output.at(rng.random())
                if prompt + output > context_tokens:
                    break
                answer, pause_s = own + 2 * turn + 1, rng.expovariate(1.0) * self.pause_s
                found.append(
                    Lengths(
                        prompt,
                        output,
                        self.application,
                        pause_s=pause_s,
                        pieces=tuple(pieces),
                        answer=answer,
                    )
                )
                pieces += [Piece(answer, output), Piece(answer + 1, self.news.at(rng.random()))]
            if found:
                return found[0]._replace(then=tuple(found[1:]))
        raise ConfigError(
            f"workload {self.application}: nothing of it fits a context of {context_tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A question behind documents that were found for it. Of `documents` the n-th is asked for with
    a probability that falls as 1/n (Zipf), and has one length wherever it appears.
    """

    application: str
    system_tokens: int
    documents: int
    a_prompt: int  # documents in it
    document: Law
    question: Law
    output: Law

    def draw(self, rng: Random, context_tokens: int) -> Lengths:
        weights = list(accumulate(1 / n for n in range(1, self.documents + 1)))
        for _ in range(REDRAWS):
            chosen = rng.choices(range(self.documents), cum_weights=weights, k=self.a_prompt)
            pieces = [Piece(SYSTEM, self.system_tokens)]
            for each in dict.fromkeys(chosen):
                length = self.document.at(Random(f"document {each}").random())
                pieces.append(Piece(SYSTEM + 1 + each, length))
            prompt = sum(n for _, n in pieces) + self.question.at(rng.random())
            output = self.output.at(rng.random())
            if prompt + output <= context_tokens:
                return Lengths(prompt, output, self.application, pieces=tuple(pieces))
        raise ConfigError(
            f"workload {self.application}: nothing of it fits a context of {context_tokens} tokens"
        )


CHAT_SESSIONS = Growing(
    "chat-sessions",
    300,
    TruncatedLognormal(4.6, 1.0, 2048, 8),
    TruncatedLognormal(4.1, 1.0, 2048, 4),
    TruncatedLognormal(5.3, 0.8, 1024, 8),
    rounds=(1, 10),
    pause_s=20.0,
)
AGENT_LOOPS = Growing(
    "agent-loops",
    1500,
    TruncatedLognormal(6.2, 0.8, 4096, 64),
    TruncatedLognormal(5.5, 1.0, 2048, 16),
    TruncatedLognormal(4.4, 0.6, 512, 16),
    rounds=(5, 20),
    pause_s=1.0,
)
RAG = Retrieved(
    "rag",
    200,
    500,
    3,
    TruncatedLognormal(6.7, 0.5, 2048, 128),
    TruncatedLognormal(3.4, 0.6, 256, 8),
    TruncatedLognormal(5.0, 0.7, 1024, 8),
)
SYSTEM_PROMPT = replace(
    CHAT_SESSIONS, application="system-prompt", system_tokens=3000, rounds=(1, 1)
)
