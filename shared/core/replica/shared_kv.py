"""Counts the free KV of one model (target or draft) for the request table, with shared blocks."""


class SharedKv:
    """The KV of one model, of which requests share some blocks. Rows hold each block as if it were
    their own; `held` is their sum.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        # The blocks that the worker saves because requests share them, at least: its last report,
        # less all that was dropped or ended since.
        self.shared = 0
        # blocks found in a prefix cache may be promised to a plan in flight already: the engine
        # then does less of that plan
        self.overdrawn = False

    def share(self, blocks: int, held: int) -> None:
        """The worker saves this many blocks, already without those that plans in flight drop."""
        self.shared = min(max(blocks, 0), held)
        self.overdrawn = self.overdrawn or held - self.shared > self._blocks

    def overdraw(self) -> None:
        """A prefix cache had more of a prompt than was counted."""
        self.overdrawn = True

    def unshare(self, blocks: int) -> None:
        """A row loses these blocks. Other rows may share all of them: then none becomes free."""
        self.shared = max(0, self.shared - blocks)

    def free(self, held: int) -> int:
        """The blocks that may still be promised."""
        free = self._blocks - held + self.shared
        if free < 0 and self.overdrawn:
            return 0
        self.overdrawn = False
        return free
