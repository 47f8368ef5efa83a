"""Says how many replicas compute prompts only, so that the busiest one has the least to do.

Together, each replica makes a pass for its decodes as often as the tightest pace asks, and has the
rest of its time for work. Apart, a replica that computes prompts makes no such passes; the others
make them for more decodes each, and KV moves to them. docs/apart.md has an example.
"""

from typing import NamedTuple


class Work(NamedTuple):
    """The work that comes, in seconds a second. `share`: of a replica's time, beside passes."""

    prefill_s: float
    decode_s: float
    move_s: float  # for the KV of what is computed elsewhere to come, over one link
    share: float


def prompts_only(work: Work, replicas: int) -> int:
    """The number of replicas, of so many, that compute prompts only; 0: all serve both."""
    together = (work.prefill_s + work.decode_s) / work.share

    def busiest(count: int) -> float:
        others = replicas - count
        decoding = max(work.decode_s / work.share, work.move_s) / others
        return max(work.prefill_s / count, decoding)

    best = min(range(1, replicas), key=busiest, default=0)
    return best if best and busiest(best) < together / replicas else 0
