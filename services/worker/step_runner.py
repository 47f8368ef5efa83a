"""Runs one iteration beside the engine: frees, loads, computes, ends outputs, makes their text."""

from collections.abc import Mapping, Sequence

from services.worker.engine import Done, Engine, Likely, Outcome, RefusedError
from services.worker.engines.kv_calls import KvCalls
from services.worker.output_processor import OutputProcessor
from shared.columns import unpack_list
from shared.core.worker.step import Ran, Step, TurnDone, Work
from shared.policy.speculation import along
from shared.schemas import Likelihood, TokenLogprob
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, Slot


class StepRunner:
    """An engine and the processor of what it generates."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.kv = engine, KvCalls(engine)
        self._tokenizer, self._processor = tokenizer, OutputProcessor(tokenizer)

    def run(self, step: Step) -> Ran:
        return run_step(self.engine, self._processor, step)

    def reset(self) -> None:
        self._processor = OutputProcessor(self._tokenizer)
        self.engine.restart()


def run_step(engine: Engine, processor: OutputProcessor, step: Step) -> Ran:
    """Run the step; return what each work entry did, and the seconds that the engine took."""
    for slot in step.preempts:
        engine.preempt(Slot(slot))
    for slot in step.releases:
        engine.release(Slot(slot))
        processor.close(Slot(slot))
    refused: dict[int, str] = {}
    for load in step.loads:
        try:
            engine.load(load)
        except RefusedError as error:
            refused[load.slot] = str(error)
        else:
            processor.open(
                load.slot, load.sampling, unpack_list(load.resume.tokens), load.resume.text
            )
    if not step.work:
        return _ran(engine, [], Outcome([], 0.0))
    if refused:
        return _without(refused, engine, processor, step)
    outcome = engine.execute(step.work, step.selection)
    done = [
        _step_done(processor, work, did) for work, did in zip(step.work, outcome.done, strict=True)
    ]
    return _ran(engine, done, outcome)


def _ran(engine: Engine, done: Sequence[TurnDone], outcome: Outcome) -> Ran:
    state = engine.snapshot()
    return Ran(
        done,
        outcome.exec_s,
        outcome.outside_s,
        outcome.drafted_s,
        state.shared_blocks,
        state.draft_shared_blocks,
        outcome.loaded_s,
        outcome.prefixes,
    )


def _without(
    refused: Mapping[int, str], engine: Engine, processor: OutputProcessor, step: Step
) -> Ran:
    """The step without the refused requests, which fail with the engine's message."""
    kept = [entry for entry, work in enumerate(step.work) if work.slot not in refused]
    selection = None if step.selection is None else along(step.selection, kept)
    rest = step._replace(
        preempts=(),
        releases=(),
        loads=(),
        work=[step.work[entry] for entry in kept],
        selection=selection,
    )
    ran = run_step(engine, processor, rest)
    done = iter(ran.done)
    whole = [
        TurnDone(0, (), "", FinishReason.INVALID, message=refused[work.slot], refused=True)
        if work.slot in refused
        else next(done)
        for work in step.work
    ]
    return ran._replace(done=whole)


def _step_done(processor: OutputProcessor, work: Work, did: Done) -> TurnDone:
    if did.failed:
        return TurnDone(
            did.computed,
            (),
            processor.finish(work.slot),
            FinishReason.INVALID,
            did.drafted,
            cached=did.cached,
            message=did.failed,
        )
    tokens, text, finish = _end(processor, work, did.tokens)
    # an end may have cut the tokens
    logprobs = [
        _token_logprob(processor, *known) for known in zip(tokens, did.logprobs, strict=False)
    ]
    return TurnDone(did.computed, tokens, text, finish, did.drafted, logprobs, did.cached)


def _token_logprob(processor: OutputProcessor, token: int, likely: Likely) -> TokenLogprob:
    def named(token: int, logprob: float) -> Likelihood:
        return Likelihood(token, processor.piece(token), logprob)

    return TokenLogprob(named(token, likely.logprob), [named(*other) for other in likely.top])


def _end(
    processor: OutputProcessor, work: Work, tokens: Sequence[int]
) -> tuple[Sequence[int], str, FinishReason | None]:
    """The tokens that count, their text (an end-of-sequence token has none), and how it ended."""
    if not tokens:
        return (), "", None
    slot = work.slot
    kept = list(tokens[: work.limit])
    finish = work.limit_reason if len(kept) == work.limit else None
    spoken_tokens = kept
    if work.stops:
        for n, token in enumerate(kept):
            if token in work.stops:
                kept, spoken_tokens, finish = kept[: n + 1], kept[:n], FinishReason.STOP
                break
    spoken = processor.say(slot, spoken_tokens)
    if spoken.stopped:
        return kept[: spoken.tokens_kept], spoken.text, FinishReason.STOP
    return kept, spoken.text + (processor.finish(slot) if finish is not None else ""), finish
