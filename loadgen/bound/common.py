"""The tokens of prompts that some other request has too, and that a scheduler with a prefix cache
need not compute, or hold, for each (docs/bound.md, 2).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.load.mix import PlannedRequest
from shared.prefix import CHAIN_TOKENS, Chain, chain_of_pieces

Tokens = NDArray[np.int64]


class Common(NamedTuple):
    """Along requests, the most tokens with which the text begins as that of another: of one that
    `earlier` had come, of the prompt without its last token; and of any, `anywhere` in the plan.
    """

    earlier: Tokens
    anywhere: Tokens

    @property
    def some(self) -> bool:
        return bool(self.anywhere.any())

    def only(self, kept: NDArray[np.bool_]) -> "Common":
        return Common(self.earlier[kept], self.anywhere[kept])


def common(requests: Sequence[PlannedRequest]) -> Common:
    """The common tokens of these requests. A round comes as early as its session."""
    chains = [chain_of_pieces(request.text) for request in requests]
    count = len(requests)
    earlier, anywhere = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    holders = Counter(block for chain in chains for block in chain)
    seen = set[int]()
    for i in sorted(range(count), key=lambda i: requests[i].arrival_s):
        if requests[i].text:
            prompt = requests[i].prompt_tokens
            before = _most(_first(chains[i], seen.__contains__))
            earlier[i] = min(prompt - 1, before)
            anywhere[i] = max(before, _most(_first(chains[i], lambda block: holders[block] > 1)))
        seen.update(chains[i])
    return Common(earlier, anywhere)


def _first(chain: Chain, is_common: Callable[[int], bool]) -> int:
    """The number of blocks until the first that is not common."""
    return next((n for n, block in enumerate(chain) if not is_common(block)), len(chain))


def _most(blocks: int) -> int:
    """The most tokens that texts have in common whose chains have so many blocks in common."""
    return blocks * CHAIN_TOKENS + CHAIN_TOKENS - 1
