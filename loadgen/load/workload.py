"""The lengths of prompts and outputs: named synthetic workloads, and the rows of a trace.

A workload whose name ends in `-placeholder` consists of guesses, so that a policy can be tried on a
load of that kind. No claim of a paper can be checked with it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from loadgen.load.lengths.alike import AGENT_LOOPS, CHAT_SESSIONS, RAG, SYSTEM_PROMPT
from loadgen.load.lengths.laws import (
    REDRAWS,
    Drawn,
    Knots,
    Law,
    Lengths,
    Shorter,
    TruncatedLognormal,
    TruncatedWeibull,
    coupled,
    scaled_beta,
)
from loadgen.load.rows.row import TraceRow
from loadgen.load.trace import Trace
from shared.errors import ConfigError
from shared.prefix import pieces_of_ids


class LengthSource(Protocol):
    """A source of lengths. `index`: of the request; `rank`: its tier's place, tightest first."""

    def draw(self, index: int, rank: int, rng: Random) -> Lengths: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of one application. `rank_correlation`: Spearman's, by a Gaussian copula."""

    application: str
    prompt: Law
    output: Law
    rank_correlation: float = 0.0

    def pair(self, rng: Random, context_tokens: int) -> Lengths:
        """Draw a pair that the context can hold. Raises ConfigError if nothing ever fits."""
        for _ in range(REDRAWS):
            u, v = rng.random(), rng.random()
            if self.rank_correlation:
                v = coupled(u, v, self.rank_correlation)
            prompt, output = self.prompt.at(u), self.output.at(v)
            if prompt + output <= context_tokens:
                return Lengths(prompt, output, self.application)
        raise ConfigError(
            f"workload {self.application}: nothing of it fits a context of {context_tokens} tokens"
        )

    def draw(self, rng: Random, context_tokens: int) -> Lengths:
        return self.pair(rng, context_tokens)

    def shorter(self, times: int) -> "Shape":
        return Shape(
            self.application,
            Shorter(self.prompt, times),
            Shorter(self.output, times),
            self.rank_correlation,
        )


@dataclass(frozen=True, slots=True)
class Thinking:
    """Prompt, thinking and response, drawn independently; the output is thinking and response."""

    application: str
    prompt: Law
    thinking: Law
    response: Law

    def draw(self, rng: Random, context_tokens: int) -> Lengths:
        """Draw the lengths as `Shape.pair` does."""
        for _ in range(REDRAWS):
            prompt, thinking, response = (
                law.at(rng.random()) for law in (self.prompt, self.thinking, self.response)
            )
            if prompt + thinking + response <= context_tokens:
                return Lengths(
                    prompt, thinking + response, self.application, thinking_tokens=thinking
                )
        raise ConfigError(
            f"workload {self.application}: nothing of it fits a context of {context_tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """A session of prefill-decode pairs. Each pair is a request of its own; all are drawn alike and
    independently. `cumulative[n]`: the probability of at most n + 1 pairs.
    """

    pair: Shape
    cumulative: Sequence[float]
    pause_s: float

    def draw(self, rng: Random, context_tokens: int) -> Lengths:
        rounds = 1 + min(bisect_right(self.cumulative, rng.random()), len(self.cumulative) - 1)
        first, *later = (self.pair.pair(rng, context_tokens) for _ in range(rounds))
        return first._replace(then=tuple(each._replace(pause_s=self.pause_s) for each in later))


# The datasets of QoServe Table 2, each matched to its published median and 90th percentile.
#
# ShareGPT: quantiles of the filtered file that Sarathi and QoServe use (a 70 % sample of its
# lengths; Llama-2's tokenizer).
SHAREGPT_P = (
    0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6,
    0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1,
)  # fmt: skip
SHAREGPT_PROMPT = (
    1.0, 9.0, 12.0, 16.0, 29.0, 74.0, 185.0, 388.0, 591.0, 789.4, 981.0, 1212.0, 1477.1, 1730.0,
    2086.0, 2422.0, 2828.0, 3253.0, 3756.0, 4285.8, 4921.3, 5696.0, 6204.5, 6561.0, 6926.0,
    7148.0, 7421.3, 7603.9, 7801.0, 8032.0,
)  # fmt: skip
SHAREGPT_OUTPUT = (
    2.0, 3.0, 6.0, 19.0, 47.0, 86.0, 134.0, 186.0, 233.0, 276.0, 316.0, 350.2, 384.0, 415.0,
    459.0, 497.0, 534.7, 582.0, 629.0, 682.0, 753.0, 834.0, 882.0, 919.0, 957.0, 976.0, 997.0,
    1008.0, 1021.0, 1024.0,
)  # fmt: skip
SHAREGPT = Shape("sharegpt", Knots(SHAREGPT_P, SHAREGPT_PROMPT), Knots(SHAREGPT_P, SHAREGPT_OUTPUT))
# Azure 2024: the week that QoServe used is not available to us, so two published quantiles fix two
# parameters. The families and the maxima are assumed: a Weibull law for code, whose prompts end at
# 8,192 there and would be far too long under a lognormal one.
AZURE_CONV = Shape(
    "azure-conv", TruncatedLognormal(6.8407, 1.1242, 16384), TruncatedLognormal(3.704, 1.7291, 2048)
)
AZURE_CODE = Shape(
    "azure-code", TruncatedWeibull(0.712, 6187.06, 8192), TruncatedLognormal(1.9468, 1.3676, 2048)
)
# QoServe section 4.5.1: all prompts alike, and all outputs.
LONG_PROMPTS = Shape(
    "long-prompts", Knots((0.0, 1.0), (10_000.0, 10_000.0)), Knots((0.0, 1.0), (500.0, 500.0))
)

# ShareGPT as vLLM's serving benchmark samples it, which SOLA runs on: the first prompt of a
# conversation and its answer, prompts of 4 to 1,024 tokens. The means are those of a published
# sample of 2,000 such pairs with Llama 3's tokenizer: 227 prompt and 188 output tokens. The family
# and the spread are assumed.
SHAREGPT_FIRST_TURN = Shape(
    "sharegpt-first-turn",
    TruncatedLognormal(5.1184, 1.4, 1024, 4),
    TruncatedLognormal(4.8388, 1.1, 1024, 4),
)

# The datasets of SLOs-Serve Table 4, each matched to its mean, 99th percentile and standard
# deviation there. ChatBot and Coder are laws through those three figures (their sources are parts
# of Azure 2023 with prompt and output of at most 2,048 tokens together, lumpier than any law);
# Summarizer is the quantiles of the arXiv file cut at the same 2,048 (a 70 % sample of it). The
# rank correlations are those of the recorded rows.
CHATBOT = Shape(
    "chatbot",
    scaled_beta(1.2778, 1.491, 1, 1652.15),
    scaled_beta(1.2617, 1.9262, 1, 670.563),
    0.493,
)
CODER = Shape(
    "coder",
    scaled_beta(0.6818, 0.9569, 1, 2034.39),
    TruncatedLognormal(1.67061, 1.60032, 816, 6, 5.0),
    -0.036,
)
SUMMARIZER_PROMPT = (
    1.0, 22.2, 57.0, 182.0, 484.5, 715.0, 847.0, 958.0, 1064.5, 1146.0, 1233.0, 1307.0, 1375.5,
    1441.0, 1495.5, 1552.0, 1596.0, 1638.0, 1690.0, 1739.0, 1785.5, 1832.0, 1864.0, 1885.5,
    1910.0, 1929.0, 1951.0, 1966.8, 1988.4, 2007.0,
)  # fmt: skip
SUMMARIZER_OUTPUT = (
    5.0, 27.0, 31.5, 37.0, 50.0, 67.0, 78.0, 89.0, 98.0, 109.0, 118.0, 126.0, 137.0, 147.0,
    157.0, 169.0, 182.0, 197.0, 215.0, 238.0, 266.0, 320.0, 378.5, 453.5, 821.0, 1154.0, 1479.0,
    1666.8, 1916.7, 2021.0,
)  # fmt: skip
SUMMARIZER = Shape(
    "summarizer", Knots(SHAREGPT_P, SUMMARIZER_PROMPT), Knots(SHAREGPT_P, SUMMARIZER_OUTPUT), -0.232
)
# Reasoning: thinking and response each have figures of their own there. A context below about
# 10,000 tokens excludes the longest.
REASONING = Thinking(
    "reasoning",
    TruncatedLognormal(4.7519, 0.5638, 2048, 8, -8.7871),
    scaled_beta(3.4125, 2.1846, 64, 7656.44),
    TruncatedLognormal(6.7306, 0.3109, 4096, 16, -76.0929),
)
# ToolLLM has "2.7 +- 1.1 prefill-decode pairs in a request", here a session. The lengths are taken
# as those of a pair (the paper does not say of what), and the number of pairs has the flattest law
# with these two figures on 1 to 8. A round computes its own prompt only: the paper's engine keeps
# the context of the rounds before, ours would compute it again, so it is left out, and contexts are
# shorter than theirs. The paper does not say how long a tool takes: here it takes no time.
TOOLLLM_PAIRS = (0.14245, 0.44653, 0.77187, 0.94634, 0.99324, 0.99956, 0.99999, 1.0)
TOOLLLM = Rounds(
    Shape(
        "toolllm",
        TruncatedLognormal(5.17487, 0.98324, 8192, 405, 404.01072),
        TruncatedLognormal(4.19934, 0.69159, 2048, 32, 31.37256),
    ),
    TOOLLLM_PAIRS,
    pause_s=0.0,
)
# AdaServe section 6.1: laws through mean and deviation of the prompts in the traces of its authors'
# artifact (of HumanEval, Alpaca and CNN/DailyMail; medians and 90th percentiles agree to 5 %).
# Every request there asks for 256 tokens; here it receives all of them.
OUTPUT_256 = Knots((0.0, 1.0), (256.0, 256.0))
ADASERVE = (
    Shape("coding", TruncatedLognormal(4.7844, 0.4595, 512), OUTPUT_256),
    Shape("chat", TruncatedLognormal(2.7313, 0.555, 128), OUTPUT_256),
    Shape("summary", TruncatedLognormal(6.5701, 0.5054, 2048), OUTPUT_256),
)
# Placeholders: means recalled from other papers, spreads guessed. A run with them says nothing
# about the datasets that they are named for. (SOLA gives LongBench prompts a mean of 3,300 tokens;
# here it is half of that.)
HUMANEVAL = Shape(
    "humaneval-placeholder",
    TruncatedLognormal(5.01666, 0.5, 1024, 8),
    TruncatedLognormal(4.40497, 0.6, 512, 2),
)
LONGBENCH = Shape(
    "longbench-placeholder",
    TruncatedLognormal(7.35924, 0.45, 4096, 8),
    TruncatedLognormal(4.10586, 0.9, 1024, 2),
)
CNN_DM = Shape(
    "cnn-dm-placeholder",
    TruncatedLognormal(6.79764, 0.5, 4096, 8),
    TruncatedLognormal(4.21046, 0.4, 512, 2),
)

# The shapes by rank of the tier, tightest first; the last one serves all tiers beyond.
WORKLOADS: Mapping[str, Sequence[Drawn]] = {
    "azure-code": (AZURE_CODE,),
    "azure-conv": (AZURE_CONV,),
    "sharegpt": (SHAREGPT,),
    "sharegpt-first-turn": (SHAREGPT_FIRST_TURN,),
    "mix": (AZURE_CODE, AZURE_CONV, SHAREGPT),
    "long-prompts": (LONG_PROMPTS,),
    # SLOs-Serve Table 2; its Mixed is all three.
    "chatbot": (CHATBOT,),
    "coder": (CODER,),
    "summarizer": (SUMMARIZER,),
    "mixed": (CODER, CHATBOT, SUMMARIZER),
    "reasoning": (REASONING,),
    "toolllm": (TOOLLLM,),
    "chat-sessions": (CHAT_SESSIONS,),
    "agent-loops": (AGENT_LOOPS,),
    "rag": (RAG,),
    "system-prompt": (SYSTEM_PROMPT,),
    # SOLA Table 3, Ascendra Table 2. `chatbot` and `sharegpt` stand for their ShareGPT:
    # docs/simulator.md says why.
    "longbench-placeholder": (LONGBENCH,),
    "adaserve": ADASERVE,
    # AdaServe section 6.1: coding, chat, summary. Its chat has Alpaca's prompts, of which we have
    # none: ChatBot stands for them.
    "adaserve-placeholder": (HUMANEVAL, CHATBOT, CNN_DM),
    # For small models, whose contexts are short and whose machines are slow.
    "short-mix": tuple(shape.shorter(4) for shape in (AZURE_CODE, AZURE_CONV, SHAREGPT)),
}


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A workload within a context: pairs that do not fit are drawn again."""

    shapes: Sequence[Drawn]
    context_tokens: int

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return self.shapes[min(rank, len(self.shapes) - 1)].draw(rng, self.context_tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a trace: random, or `in_order`, for recorded arrivals."""

    trace: Trace
    in_order: bool

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        rows = self.trace.rows
        row = rows[index] if self.in_order else rows[rng.randrange(len(rows))]
        return self._lengths(row)._replace(then=tuple(self._lengths(each) for each in row.then))

    def _lengths(self, row: TraceRow) -> Lengths:
        return Lengths(
            row.prompt_tokens,
            row.output_tokens,
            row.application,
            pause_s=row.pause_s,
            tier=row.tier,
            model=row.model,
            pieces=pieces_of_ids(row.ids, self.trace.id_tokens, row.prompt_tokens),
        )


def named_workload(name: str, context_tokens: int) -> Synthetic:
    """The workload of this name. Raises ConfigError for a name that is not built in."""
    shapes = WORKLOADS.get(name)
    if shapes is None:
        raise ConfigError(f"workload `{name}` is not built in; there are {', '.join(WORKLOADS)}")
    return Synthetic(shapes, context_tokens)
