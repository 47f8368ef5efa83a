"""SOLA (MLSys 2025): each iteration solves one of two problems, TTFT subject to TPOT or TPOT
subject to TTFT (section 4).

Around this file: the state monitor (state.py), the choice of the problem and the workloads
(problem.py), output lengths (output_lengths.py), peak memory (peak_memory.py). The cost models
C_p, C_d and their scaling (section 5.2, Eq. 3 to 5) are the view's profile, whatever its form:
shared/perf/online.py scales it by what was measured, for each kind of iteration. A mixed iteration
is predicted by the profile too, not by the sum of both models.

Where the paper leaves room, or does not serve what we serve (more in the files named):
- *Q_run of the iteration before*, whose C_d is the pace of the decodes to come, is here all decodes
  there are: decisions are made from the view alone.
- *k* is bounded by `max_batch_tokens`, as it is by the paper's backend; Eq. 1 alone would let an
  idle replica prefill its whole queue at once. Where not even one tile satisfies Eq. 1, or none of
  those waiting may begin, the iteration is all decodes.
- *Decodes beside prefills*: Figure 6 adds one though a prefill was cut off; the text adds them only
  once all prefills fit, and so do we.
- *n* of Eq. 2 counts those that may begin; requests that wait for memory are not helped by serving
  others first. The last prompt of the n is cut at `max_batch_tokens`.
- *Prefills without a TTFT to keep* (best-effort ones) are served when nobody with one waits, as far
  as Eq. 1 allows.
- *Nothing to decode*: there is nothing to trade, and prefills run whatever the window says.
- *Preemption*, which the paper leaves out, follows shared/policy/chunk.py where the predicted peak
  was too low; all decodes run then.
- *The window* begins anew with the first prefill that waits: before it there was nothing to weigh.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from shared.errors import ConfigError
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.fit import accept_what_fits
from shared.policy.seam import Admission, Choice, Declared, Observation, View
from shared.policy.sola.output_lengths import LengthDistributions
from shared.policy.sola.peak_memory import Room, room_of
from shared.policy.sola.problem import (
    Problem,
    Window,
    attained,
    fitting,
    fulfilment,
    pause_s,
    too_long,
)
from shared.policy.sola.state import Prefills, State
from shared.routing.routings import RouterName
from shared.schemas import Offer


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tile_tokens: Annotated[int, Meta(ge=1)] = 128  # section 4.4.3, for A100
    window: Annotated[int, Meta(ge=1)] = 4  # iterations; the paper does not state the number
    # vLLM v0.4.2: max_num_batched_tokens, a context of Llama 3
    max_batch_tokens: Annotated[int, Meta(ge=1)] = 8192
    peak_memory: bool = (
        True  # False is an ablation of section 6.3.1: a request that fits now may begin
    )
    router: RouterName = "attainable"


class Sola:
    """The policy. It learns output lengths and the recent state of the two latencies; the view
    holds all else.
    """

    name = "sola"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        """Raises: ConfigError if an iteration cannot hold a tile."""
        if settings.max_batch_tokens < settings.tile_tokens:
            raise ConfigError(
                f"policy sola: max_batch_tokens {settings.max_batch_tokens} is less than "
                f"a tile of {settings.tile_tokens}"
            )
        self._set = settings
        self._lengths = LengthDistributions()
        self._window = Window(settings.window)

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return accept_what_fits(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        running = chunk.decoding(view)
        queue = (~view.in_decode).nonzero()[0]
        if len(running.victims):
            queue = queue[~np.isin(queue, running.victims)]
        if len(queue) == 0:
            self._window.clear()
            return [chunk.fill(view, running, queue, limit_tokens=0)]
        left_out = self._lengths.left(view.prompt_tokens, view.max_tokens, view.generated_tokens)
        state = State(view, left_out, view.profile.batch_s(running.shape))
        prefills = Prefills(view, state, queue)
        room = room_of(view, running, state, prefills, predicts=self._set.peak_memory)
        ttft, tpot = state.ttft_ratios, state.tpot_ratios
        problem = self._window.problem(view.start_unix_s, *fulfilment(ttft, tpot))
        if problem is Problem.TTFT or not prefills.urgent or len(running.rows) == 0:
            longest_s = pause_s(
                state.pause_s[running.rows[state.has_tpot[running.rows]]], attained(tpot)
            )
            choice = self._for_ttft(view, running, state, prefills, room, longest_s)
        else:
            choice = self._for_tpot(view, running, prefills, room, attained(ttft))
        return [choice if choice.repeats == 1 else replace(choice, repeats=1)]

    def _for_ttft(
        self,
        view: View,
        running: Decoding,
        state: State,
        prefills: Prefills,
        room: Room,
        longest_s: float,
    ) -> Choice:
        """Prefills first, k tokens of them (Eq. 1). Decodes run only if prefills leave some of k
        free, and then as many as fit.
        """
        most, tile = self._set.max_batch_tokens, self._set.tile_tokens
        shape, taken, whole = BatchShape(), [], True
        at = room.first(0)
        while whole and at < len(prefills.rows):
            row = int(prefills.rows[at])
            left, cached = int(prefills.tokens[at]), int(view.computed_tokens[row])
            tokens = fitting(
                view.profile, shape, cached, longest_s, min(left, most - shape.prefill_tokens)
            )
            shape = shape.with_chunk(tokens, cached)
            taken.append(row)
            room.take(at)
            whole = tokens == left
            at = room.first(at + 1)
        k = shape.prefill_tokens
        if whole:
            k += fitting(view.profile, shape, 0, longest_s, most - k)
        k -= k % tile
        if not taken or k == 0:
            return _all_decodes(view, running)
        some = running
        if len(running.victims) == 0:
            some = _some(view, running, state, max(0, k - shape.prefill_tokens))
        choice = chunk.fill(view, some, np.array(taken, dtype=np.intp), limit_tokens=k)
        # KV that is about to come free was missing
        nothing_new = len(choice.slots) == len(some.rows)
        return _all_decodes(view, running) if nothing_new else choice

    def _for_tpot(
        self, view: View, running: Decoding, prefills: Prefills, room: Room, share: float
    ) -> Choice:
        """All decodes, and the fewest prefills, whole and in order, after which the other prefills
        can still keep their TTFT (Eq. 2).
        """
        may = (room.may & (prefills.spare_s < np.inf)).nonzero()[0]
        shape, taken = running.shape, list[int]()
        for i, at in enumerate(may.tolist()):
            free_tokens = self._set.max_batch_tokens - shape.prefill_tokens
            if free_tokens <= 0 or not too_long(
                view.profile.batch_s(shape), prefills.spare_s[may[i:]], share
            ):
                break
            if room.may[at]:
                row = int(prefills.rows[at])
                shape = shape.with_chunk(
                    min(int(prefills.tokens[at]), free_tokens), int(view.computed_tokens[row])
                )
                taken.append(row)
                room.take(at)
        return chunk.fill(
            view, running, np.array(taken, dtype=np.intp), limit_tokens=self._set.max_batch_tokens
        )

    def observe(self, seen: Observation) -> None:
        for ended in seen.ended:
            self._lengths.observe(ended)


def _all_decodes(view: View, running: Decoding) -> Choice:
    return chunk.fill(view, running, running.rows[:0], limit_tokens=0)


def _some(view: View, running: Decoding, state: State, count: int) -> Decoding:
    """The `count` decodes with the worst predicted TPOT. The KV that the other decodes will take
    stays reserved for them.
    """
    if count >= len(running.rows):
        return running
    rows: Rows = state.decodes_by_tpot(running.rows)[:count]
    return running._replace(rows=rows, shape=chunk.decodes_of(view, rows))
