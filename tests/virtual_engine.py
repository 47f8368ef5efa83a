"""An engine for a real WorkerCore in virtual time: what a turn takes by the profile, and yields. One token for each entry that emits."""

from dataclasses import dataclass

from shared.perf.profile import Profile
from shared.perf.shape import BatchShape
from shared.policy.turn import Turn, TurnDone, TurnWork


@dataclass(slots=True)
class _Slot:
    computed: int = 0
    decoding: bool = False  # has emitted since it was loaded


class VirtualEngine:
    """Keeps what each slot has computed, which is all that an iteration's time depends on."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._slots: dict[int, _Slot] = {}

    def run(self, turn: Turn) -> tuple[list[TurnDone], float]:
        """What every work entry did, and the seconds all of it took."""
        slots = self._slots
        for slot in turn.releases:
            del slots[slot]
        for load in turn.loads:
            slots[load.slot] = _Slot()
        if not turn.work:
            return [], 0.0
        done: list[TurnDone] = []
        prefill_tokens = prefills = prefill_sq = prefill_cross = prefill_has = decodes = decode_context = 0
        for work in turn.work:
            state, tokens = slots[work.slot], work.tokens
            if state.decoding:
                decodes += 1
                decode_context += state.computed
            else:
                prefills += 1
                prefill_tokens += tokens
                prefill_sq += tokens * tokens
                prefill_cross += state.computed * tokens
                prefill_has += state.computed
            state.computed += tokens
            state.decoding = work.emits
            done.append(outcome(work))
        shape = BatchShape(prefill_tokens, prefills, prefill_sq, prefill_cross, prefill_has, decodes, decode_context)
        return done, self._profile.batch_s(shape)


def outcome(work: TurnWork) -> TurnDone:
    """Token 0 without text if the entry emits; the output ends by the entry's limit."""
    if not work.emits:
        return TurnDone(work.tokens, (), "", None)
    return TurnDone(work.tokens, (0,), "", work.limit_reason if work.limit == 1 else None)
