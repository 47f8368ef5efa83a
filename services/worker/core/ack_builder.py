"""Builds the ack of one iteration, which says what ran: gathers entries, then writes columns."""

from shared.columns import pack
from shared.core.worker.step import Step, Timing, TurnDone
from shared.prefix import UNCHANGED, Changed, pack_hashes
from shared.schemas import Held, PlanAck
from shared.vocabulary import ReplicaId

NOT_RUN = Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class AckBuilder:
    def __init__(
        self,
        step: Step | None = None,
        timing: Timing = NOT_RUN,
        shared_blocks: int = 0,
        draft_shared_blocks: int = 0,
        prefixes: Changed = UNCHANGED,
    ) -> None:
        """Without a step the ack reports ends between iterations."""
        self._step = step
        self._timing = timing
        self._shared_blocks = shared_blocks
        self._draft_shared_blocks = draft_shared_blocks
        self._prefixes = prefixes
        self._entries: list[tuple[int, TurnDone]] = []  # slot, what was done of it
        self._answering: list[tuple[int, int]] = []  # slot, output tokens that are thinking
        self._late: list[int] = []  # slots whose first late token came
        self._ended: list[tuple[int, str]] = []  # slot, why

    def add(self, slot: int, did: TurnDone) -> None:
        self._entries.append((slot, did))

    def add_answering(self, slot: int, thinking_tokens: int) -> None:
        self._answering.append((slot, thinking_tokens))

    def add_late(self, slot: int) -> None:
        self._late.append(slot)

    def add_end(self, slot: int, why: str) -> None:
        self._ended.append((slot, why))

    def build(
        self,
        *,
        replica: ReplicaId,
        incarnation: str,
        epoch: int,
        ack_seq: int,
        held: list[Held],
        free_blocks: int,
    ) -> PlanAck:
        """The ack. `epoch` is that of the worker; an ack of a plan has the plan's."""
        step, timing, entries = self._step, self._timing, self._entries
        plan = None if step is None else step.plan
        output = [(slot, did) for slot, did in entries if did.has_output]
        drafted = [did.drafted for _, did in entries]
        cached = [did.cached for _, did in entries]
        return PlanAck(
            replica=replica,
            incarnation=incarnation,
            epoch=epoch if plan is None else plan.epoch,
            plan_seq=0 if plan is None else plan.seq,
            ack_seq=ack_seq,
            slots=pack([slot for slot, _ in entries]),
            computed=pack([did.computed for _, did in entries]),
            emitted=pack([len(did.tokens) for _, did in entries]),
            tokens=pack([token for _, did in output for token in did.tokens]),
            texts=[did.text for _, did in output],
            logprobs=[logprob for _, did in output for logprob in did.logprobs],
            logprob_slots=pack([slot for slot, did in output if did.logprobs]),
            ended=self._ended,
            held=held,
            preempted=b"" if plan is None else plan.preempted,
            relegated=b"" if plan is None else plan.relegated,
            promoted=b"" if plan is None else plan.promoted,
            skipped=b"" if step is None else pack(step.skipped),
            drafted=pack(drafted) if any(drafted) else b"",
            cached=pack(cached) if any(cached) else b"",
            answering=pack([slot for slot, _ in self._answering]),
            thinking_tokens=pack([tokens for _, tokens in self._answering]),
            free_blocks=free_blocks,
            shared_blocks=self._shared_blocks,
            draft_shared_blocks=self._draft_shared_blocks,
            started_unix_s=timing.started_unix_s,
            ended_unix_s=timing.ended_unix_s,
            exec_s=timing.exec_s,
            outside_s=timing.outside_s,
            drafted_s=timing.drafted_s,
            loaded_s=timing.loaded_s,
            idle_s=timing.idle_s,
            late_s=timing.late_s,
            decodes_s=timing.decodes_s,
            drafts_s=timing.drafts_s,
            late=pack(self._late) if self._late else b"",
            kept=pack_hashes(self._prefixes.kept),
            moved=pack_hashes(self._prefixes.moved),
            dropped=pack_hashes(self._prefixes.dropped),
        )
