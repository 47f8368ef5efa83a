"""One request of a trace, and the ids of its prompt's blocks."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import ConfigError

# the sizes of blocks in published traces, in tokens; Mooncake's first
BLOCKS = (512, 1024, 256, 128, 64, 32, 16)


class TraceRow(NamedTuple):
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    application: str
    tier: str = ""  # empty: not recorded
    model: str = ""  # likewise
    # of the blocks of its prompt, the first first: equal ids stand for equal tokens
    ids: tuple[int, ...] = ()
    pause_s: float = 0.0  # of a later round: from the end of the round before
    then: "tuple[TraceRow, ...]" = ()  # the later rounds of its session

    @property
    def empty(self) -> bool:
        """True for a failed request, which had no tokens."""
        return not (self.prompt_tokens and self.output_tokens)


class Read(NamedTuple):
    line: int
    row: TraceRow


def block_tokens(file: str, found: Sequence[Read]) -> int:
    """The tokens of a block, as the numbers of ids tell. Some traces leave out a prompt's last
    block, which is not full. Raises ConfigError for a row that does not agree with the others.
    """
    rows = [each for each in found if each.row.ids and not each.row.empty]

    def misfits(size: int, short: int) -> list[Read]:
        return [
            each
            for each in rows
            if not 0 <= -(-each.row.prompt_tokens // size) - len(each.row.ids) <= short
        ]

    for short in (0, 1):
        for size in BLOCKS:
            if not misfits(size, short):
                return size
    fits = Counter({size: -len(misfits(size, 1)) for size in BLOCKS})
    size = fits.most_common(1)[0][0]
    line, row = misfits(size, 1)[0]
    raise ConfigError(
        f"trace {file}, line {line}: {len(row.ids)} block ids for {row.prompt_tokens} tokens; "
        f"in most rows blocks have {size} tokens"
    )
