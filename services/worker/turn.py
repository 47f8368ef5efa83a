"""One iteration on the engine thread: free, load, compute, then decide where each output ends and what of it is said."""

from collections.abc import Sequence

from services.worker.engine import Engine, Likely, Load, Work
from services.worker.speaker import Speaker
from shared.columns import unpack_list
from shared.policy.turn import Turn, TurnDone, TurnWork
from shared.schemas import Likelihood, TokenLogprob
from shared.vocabulary import FinishReason, Slot


def take_turn(engine: Engine, speaker: Speaker, turn: Turn) -> tuple[list[TurnDone], float]:
    """What each work entry did, and the seconds the engine took."""
    for slot in turn.releases:
        engine.release(Slot(slot))
    for slot in turn.closes:
        speaker.close(Slot(slot))
    for load in turn.loads:
        engine.load(Load(Slot(load.slot), load.tokens, load.generated, load.sampling, load.seed))
        if load.fresh:
            speaker.open(Slot(load.slot), load.sampling, unpack_list(load.resume.tokens), load.resume.text)
    if not turn.work:
        return [], 0.0
    outcome = engine.execute([Work(Slot(w.slot), w.tokens, w.emits) for w in turn.work], turn.selection)
    done = []
    for work, did in zip(turn.work, outcome.done, strict=True):
        tokens, text, finish = _end(speaker, work, did.tokens)
        logprobs = [_told(speaker, *known) for known in zip(tokens, did.logprobs, strict=False)]  # an end may have cut the tokens
        done.append(TurnDone(did.computed, tokens, text, finish, did.drafted, logprobs))
    return done, outcome.exec_s


def _told(speaker: Speaker, token: int, likely: Likely) -> TokenLogprob:
    def named(token: int, logprob: float) -> Likelihood:
        return Likelihood(token, speaker.piece(token), logprob)

    return TokenLogprob(named(token, likely.logprob), [named(*other) for other in likely.top])


def _end(speaker: Speaker, work: TurnWork, tokens: Sequence[int]) -> tuple[Sequence[int], str, FinishReason | None]:
    """The tokens that count, their text, and how the output ended, if it did. An end-of-sequence token counts but is not said."""
    if not tokens:
        return (), "", None
    slot = Slot(work.slot)
    kept = list(tokens[: work.limit])
    finish = work.limit_reason if len(kept) == work.limit else None
    said = kept
    if work.stops:
        for n, token in enumerate(kept):
            if token in work.stops:
                kept, said, finish = kept[: n + 1], kept[:n], FinishReason.STOP
                break
    spoken = speaker.say(slot, said)
    if spoken.stopped:
        return kept[: spoken.tokens_kept], spoken.text, FinishReason.STOP
    return kept, spoken.text + (speaker.finish(slot) if finish is not None else ""), finish
