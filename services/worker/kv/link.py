"""The speed at which KV comes to a worker: measured at the start, corrected by each fetch."""

import asyncio

HALF_BYTES = 64 << 20  # after so many bytes more, what was measured counts half


class Link:
    """Bytes and seconds of what has come. `pretend_s`: of a simulated link, that a token takes."""

    def __init__(self, token_bytes: float, pretend_s: float) -> None:
        self._token_bytes, self._pretend_s = token_bytes, pretend_s
        self._bytes = self._seconds = 0.0
        self._free_at_s = 0.0  # when the simulated link is free

    @property
    def token_s(self) -> float:
        """The seconds that a token's KV takes; 0: unknown."""
        if self._pretend_s:
            return self._pretend_s
        return self._token_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def came(self, count: int, seconds: float) -> None:
        """So many bytes took so long. Few bytes change little."""
        stays = 0.5 ** (count / HALF_BYTES)
        self._bytes = stays * self._bytes + count
        self._seconds = stays * self._seconds + seconds

    async def pretend(self, tokens: int) -> None:
        """The time of these tokens on a simulated link, which carries one thing after another."""
        if not self._pretend_s:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + tokens * self._pretend_s
        await asyncio.sleep(self._free_at_s - now_s)
