"""The load: questions as the shipped models were trained on, in three tiers of pace, at rates that
rise from stage to stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import Lengths
from shared.rules.tiers import Tier, TierSet
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Definition, Slo

_WORDS = (
    "river house tree light stone walk water hand bird horse word night table road ship fire "
    "garden letter music paper school wind king snow bread city door field gold hour island job "
    "kitchen lake market nail ocean pencil queen rain salt tower uncle valley wall year animal "
    "bottle chair dream engine flower glass hammer insect jacket knife lamp mirror needle"
)
WORDS = tuple(_WORDS.split())
QUESTIONS = ("What is a {}?", "What does it mean to have a {}?", "Tell me about the {}.")
SHORTEST_TOKENS, LONGEST_TOKENS = 48, 144  # of an output
TTFT_S = 0.5


@dataclass(frozen=True, slots=True)
class RisingLoad:
    """The requests of a run: each of `rates_per_s` for an equal part of `duration_s`."""

    rates_per_s: Sequence[float]
    duration_s: float
    paces_s: Sequence[float]  # the longest mean time per token, tight, medium, loose
    seed: int

    @property
    def stage_s(self) -> float:
        return self.duration_s / len(self.rates_per_s)

    @property
    def tiers(self) -> TierSet:
        names = ("tight", "medium", "loose")
        tiers = {
            name: Tier(slo=Slo(ttft_s=TTFT_S, tbt_s=pace_s, definition=Definition.MEAN_TPOT))
            for name, pace_s in zip(names, self.paces_s, strict=True)
        }
        return TierSet(name="paces", default="loose", tiers=tiers)

    def stage(self, request: PlannedRequest) -> int:
        return min(int(request.arrival_s / self.stage_s), len(self.rates_per_s) - 1)

    def requests(self, prompts: "Questions") -> list[PlannedRequest]:
        """The plan, the same for the same arguments."""
        steps = [(self.stage_s, rate) for rate in self.rates_per_s]
        arrivals = draw_arrivals(Gaps(), 1.0, self.duration_s, self.seed, steps)
        return plan_requests(arrivals, prompts, self.tiers, self.seed)


class Questions:
    """The prompt of each request, and its lengths."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._seed = seed
        self._prompts = [
            tokenizer.encode(
                f"<|im_start|>user\n{question.format(word)}<|im_end|>\n<|im_start|>assistant\n"
            )
            for word in WORDS
            for question in QUESTIONS
        ]

    def of(self, number: int) -> list[int]:
        return Random(f"{self._seed}/{number}/question").choice(self._prompts)

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        output_tokens = rng.randint(SHORTEST_TOKENS, LONGEST_TOKENS)
        return Lengths(len(self.of(index)), output_tokens, "question")
