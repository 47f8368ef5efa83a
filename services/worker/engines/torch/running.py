"""The torch engine's state of one request."""

from dataclasses import dataclass, field

from services.worker.engines.torch import paged
from services.worker.engines.torch.adjusting import always_asks
from services.worker.engines.torch.constraint import Constraint
from services.worker.engines.torch.prefixes import Prefix
from shared.schemas import Sampling


@dataclass(slots=True)
class Running:
    prompt: int  # number of prompt tokens
    tokens: list[int]  # prompt and output
    ends: frozenset[int]  # tokens that end its output
    place: paged.Place
    sampling: Sampling
    seed: int
    constraint: Constraint | None  # None: free text
    prefix: Prefix
    keep_s: float  # as in Load
    computed: int = 0
    # from `min_tokens` on, the likeliest token by the logits is its token, whatever its text
    likeliest: bool = field(init=False)

    def __post_init__(self) -> None:
        s = self.sampling
        self.likeliest = (
            (s.temperature <= 0 or s.top_k == 1)
            and s.logprobs is None
            and self.constraint is None
            and not always_asks(s)
        )
