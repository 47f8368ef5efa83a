"""Records whole passes of a model as CUDA graphs: Python takes longer to ask for a thousand kernels
than a GPU to run them.

A graph computes in the same memory each time: a batch is padded to one of few sizes, and its
numbers are written where the graph reads them. Usual sizes are recorded at the start, others when
they come. Batches with long chunks or much padding are computed without a graph.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from services.worker.engines.torch.attention.attention import Batch, Part, Piece, positions_of
from services.worker.engines.torch.attention.padded_rows import (
    LONGEST_RUN,
    PaddedRows,
    Shape,
    indices,
    runs_of,
)
from services.worker.engines.torch.paged import Pool

log: structlog.stdlib.BoundLogger = structlog.get_logger()

LONGEST_CHUNK = 128  # tokens
MOST_TOKENS = 512
MOST_SEEN = 1 << 17  # positions, all runs together: they are copied in every layer
WIDTHS = (1, 4, LONGEST_RUN)
FEWER = 4  # tokens to a run, where there are that few runs
SHORTEST = 128  # positions of a run; each further size has twice as many
USUAL_LONGEST = 512  # up to this all sizes are recorded at the start, beyond it those of decodes
RARE = 64  # sizes that may be recorded later

# compute(batch, ids [1, T], positions [1, T], rows [N]) -> logits [1, N, vocabulary]
Compute = Callable[[Batch, Tensor, Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """The sizes that a pass is padded to."""

    tokens: int
    runs: Shape

    @property
    def columns(self) -> list[int]:
        """Lengths of the inputs: ids, positions, writes, rows asked for, place, at, before, own."""
        runs, width, longest = self.runs
        return [self.tokens] * 5 + [runs * longest, runs, runs * width]


class _StaticBatch:
    """Implements Batch (attention/attention.py); all its rows are padded."""

    def __init__(self, pool: Pool, writes: Tensor, padded: PaddedRows) -> None:
        self._pool, self._writes, self._padded = pool, writes, padded

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        pools = self._pool.write(layer, self._writes, k, v)
        return self._padded.attend(q, pools, scale)[None]


class _Recorded(NamedTuple):
    inputs: Tensor
    graph: Any  # torch.cuda.CUDAGraph, of which torch's types say too little


class RecordedPasses:
    """The passes of one model over its pool. On a CPU nothing is recorded, only padded."""

    def __init__(
        self, compute: Compute, pool: Pool, spare: int, logits: Tensor, *, seen: int
    ) -> None:
        """`spare`: a pool position for padding. `logits`: [MOST_TOKENS, vocabulary], for results.
        `seen`: the most positions of a sequence.
        """
        self._compute, self._pool, self._spare = compute, pool, spare
        self._logits = logits
        self._passes: dict[Size, _Recorded] = {}
        self._memory: Any = None
        self._recording: Any = None
        self._more = RARE  # sizes that may still be recorded
        if logits.is_cuda:
            self._recording = torch.cuda.Stream(logits.device)  # type: ignore[no-untyped-call]
            for size in usual_sizes(seen):
                self._passes[size] = self._record(size, self._idle(size))
            torch.cuda.empty_cache()  # what passes beside the recording took

    @property
    def later(self) -> int:
        """The number of sizes recorded, or tried, since requests are served."""
        return RARE - self._more

    def logits(
        self, ids: Sequence[int], parts: Sequence[Part], rows: Sequence[int]
    ) -> Tensor | None:
        """As PagedModel.logits, valid until the next call; None for a batch that fits no size."""
        if len(ids) > MOST_TOKENS or any(
            isinstance(part, Piece) and part.new > LONGEST_CHUNK for part in parts
        ):
            return None
        runs = [run for part in parts for run in runs_of(part)]
        size = size_of(
            len(ids),
            len(runs),
            max(len(run.own) for run in runs),
            max(len(run.sees) for run in runs),
        )
        if not fits(size):
            return None
        in_sequence, in_pool = positions_of(parts)
        place, *others = indices(runs, size.runs)
        last = size.runs.runs * size.runs.width - 1
        given = torch.from_numpy(
            np.concatenate(
                [
                    _filled(ids, size.tokens, 0),
                    _filled(in_sequence, size.tokens, 0),
                    _filled(in_pool, size.tokens, self._spare),
                    _filled(rows, size.tokens, 0),
                    _filled(place, size.tokens, last),
                    *map(np.ravel, others),
                ]
            )
        )
        if not self._logits.is_cuda:
            self._run(size, given)
            return self._logits[: len(rows)]
        recorded = self._passes.get(size) or self._try_to_record(size, given)
        if recorded is None:
            return None
        recorded.inputs.copy_(given)
        recorded.graph.replay()
        return self._logits[: len(rows)]

    def _run(self, size: Size, inputs: Tensor) -> None:
        ids, positions, writes, rows, *padded = torch.split_with_sizes(inputs, size.columns)
        batch = _StaticBatch(self._pool, writes, PaddedRows(size.runs, *padded))
        self._logits[: size.tokens] = self._compute(batch, ids[None], positions[None], rows)[0]

    def _idle(self, size: Size) -> Tensor:
        """Inputs that write only padding."""
        columns = [torch.zeros(length, dtype=torch.long) for length in size.columns]
        columns[2] += self._spare
        columns[-1] += 1  # each row sees one
        return torch.cat(columns).to(self._logits.device)

    def _try_to_record(self, size: Size, given: Tensor) -> _Recorded | None:
        """Record a size while requests are served. None if too many are recorded, or it fails."""
        if not self._more:
            return None
        self._more -= 1
        try:
            recorded = self._record(size, given.to(self._logits.device))
        except RuntimeError as error:  # no memory, for one
            log.warning("engine.pass_not_recorded", reason=str(error).split("\n", 1)[0])
            self._more = 0
            return None
        self._passes[size] = recorded
        return recorded

    def _record(self, size: Size, inputs: Tensor) -> _Recorded:
        device = self._logits.device
        now, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        self._recording.wait_stream(now)
        with torch.cuda.device(device), torch.cuda.stream(self._recording):
            self._run(size, inputs)  # what libraries do once may not be recorded
            # torch.cuda.graph would collect garbage first, and give memory back
            graph.capture_begin(pool=self._memory)
            try:
                self._run(size, inputs)
            finally:
                graph.capture_end()
        now.wait_stream(self._recording)
        self._memory = graph.pool()
        return _Recorded(inputs, graph)


def size_of(tokens: int, runs: int, rows: int, seen: int) -> Size:
    """The size for these numbers of tokens and runs; `rows` and `seen`: of the longest run."""
    padded = _power(tokens)
    longest = max(SHORTEST, _power(seen))
    width = next(width for width in WIDTHS if width >= rows)
    if width == 1:
        return Size(padded, Shape(padded, 1, longest))
    needed = runs + (padded > tokens)  # a token that is padding needs a run that is padding
    fewer = max(1, padded // FEWER)
    return Size(padded, Shape(fewer if needed <= fewer else padded, width, longest))


def fits(size: Size) -> bool:
    """True unless a pass of this size would see, and copy, too many positions."""
    return size.runs.runs * size.runs.longest <= MOST_SEEN


def usual_sizes(seen: int) -> Iterator[Size]:
    """The sizes of a busy engine's passes. `seen`: the most positions that a sequence has."""
    tokens = 1
    while tokens <= MOST_TOKENS:
        shapes = [(tokens, 1)]
        if tokens > 1:
            shapes += product({tokens, max(1, tokens // FEWER)}, WIDTHS[1:])
        longest = SHORTEST
        while longest <= max(SHORTEST, _power(seen)):
            for runs, width in shapes if longest <= USUAL_LONGEST else shapes[:1]:
                size = Size(tokens, Shape(runs, width, longest))
                if fits(size):
                    yield size
            longest *= 2
        tokens *= 2


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _filled(values: Any, length: int, padding: int) -> Any:
    out = np.full(length, padding, dtype=np.int64)
    out[: len(values)] = values
    return out
