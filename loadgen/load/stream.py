"""Shows one answer as it streams: the text as it arrives, and the answer's latencies."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.client.client import Handle
from shared.schemas import Delta, Verdict


@dataclass(slots=True)
class Streamed:
    """An answer, timed by our clock. `attached`: the id was used before; it is a replay."""

    began_s: float
    verdict: Verdict
    attached: bool
    tier: str
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    first_tokens: int = 0  # that arrived together with the first
    last_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float | None:
        if self.attached:
            return self.verdict.ttft_s
        return None if self.first_s is None else self.first_s - self.began_s

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token."""
        if self.attached:
            return None if not self.verdict.mean_tpot_s else 1 / self.verdict.mean_tpot_s
        if self.first_s is None or self.last_s <= self.first_s:
            return None
        return (len(self.tokens) - self.first_tokens) / (self.last_s - self.first_s)

    @property
    def in_words(self) -> str:
        """Standard or relegated, SLO met or not, TTFT, tokens and their pace, how it ended."""
        verdict, pace = self.verdict, self.tokens_per_s
        parts = [
            "relegated to best effort"
            if verdict.relegated
            else verdict.service_class.replace("_", " "),
            "SLO met" if verdict.slo_met else "SLO missed",
            f"TTFT {1000 * self.ttft_s:.0f} ms" if self.ttft_s is not None else "no token",
            f"{verdict.output_tokens} tokens" + (f" at {pace:.1f}/s" if pace is not None else ""),
            f"ended by {verdict.finish_reason}"
            + (f": {verdict.message}" if verdict.message else ""),
        ]
        return ", ".join((["attached to an earlier request"] if self.attached else []) + parts)


async def stream(handle: Handle, began_s: float, show: Callable[[str], None]) -> Streamed:
    """Show the text as it arrives. Cancelled, it cancels the request. Raises SlacklineError."""
    texts, tokens, first_s, first_tokens, last_s = list[str](), list[int](), None, 0, 0.0
    try:
        async for event in handle:
            if isinstance(event, Delta):
                if event.tokens:
                    last_s = time.monotonic()
                    if first_s is None:
                        first_s, first_tokens = last_s, len(event.tokens)
                tokens += event.tokens
                texts.append(event.text)
                show(event.text)
    except asyncio.CancelledError:
        await handle.cancel()
        raise
    verdict, received = await handle.wait(), handle.received
    assert received is not None, "a handle is given once its request is stored"
    return Streamed(
        began_s,
        verdict,
        received.attached,
        received.tier,
        texts,
        tokens,
        first_s,
        first_tokens,
        last_s,
    )


def printable(text: str) -> str:
    """The text without control characters, which terminals obey, but line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
