"""Plays requests and faults on one replica, its planner and worker, for tests of both.

The bench stands for everything around the two: it offers, withdraws, cancels, settles, and offers
again what came back. After every event it checks the state of both; at the end, that every request
ended once with just the tokens it should have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from services.worker.engines.sim.engine import readable_token
from shared.columns import pack, unpack_list
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.record.record import FINAL
from shared.core.record.states import State, state_of
from shared.core.record.verdict import ended
from shared.core.replica.events import Heartbeat, Offered, Refused
from shared.policy.seam import Phase, View
from shared.schemas import (
    AttemptOver,
    Body,
    Delta,
    Offer,
    OfferAccepted,
    OfferAnswer,
    OfferInDoubt,
    Record,
    Sampling,
)
from shared.vocabulary import FinishReason, RecordState, RequestKey, ServiceClass, Slo
from tests import made
from tests.shared.core.replica_shells import REPLICA, Shells, World

HOPS = 16  # a request that so many attempts did not place is relegated
STEPS = 40_000  # of one run: far more than any schedule here needs


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a schedule, `after_s` after the one before it."""

    after_s: float
    prompt: int
    max_tokens: int
    output: int
    slo: Slo
    importance: float = 1.0
    expires_s: float = 1e6
    wait_s: float = 1e6  # for its first token, as a best-effort request
    best_effort: bool = False
    thinking: int | None = None  # tokens of the output


@dataclass(frozen=True, kw_only=True)
class Act:
    """Something that happens at an instant: `what` to request `who` (modulo their number)."""

    at_s: float
    # cancel, withdraw, drain, leave, resync, takeover, false_ack, lose_ack, lose_plan, lose_hold
    what: str
    who: int = 0


@dataclass
class Client:
    """The output that one client has received."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    ends: list[str] = field(default_factory=list)
    # seconds beyond its wait at which a best-effort request had its first token, or its end
    beyond_s: float = 0.0


class Bench(Shells):
    def __init__(self, world: World, asks: Sequence[Ask], acts: Sequence[Act]) -> None:
        super().__init__(world)
        self.clients: dict[RequestKey, Client] = {}
        self.names: list[RequestKey] = []
        self.watch: Callable[[View], object] = lambda view: None
        self.take_over()
        at_s = 0.0
        for number, ask in enumerate(asks):
            at_s += ask.after_s
            self.line.at(at_s, self.arrive, number, ask)
        self.to_come = len(asks)
        for act in acts:
            self.line.at(act.at_s, self.act, act)

    # ------------------------------------------------------------ admission and the clients

    def arrive(self, number: int, ask: Ask) -> None:
        self.to_come -= 1
        key, now_s = RequestKey(f"t.{number}"), self.line.now_s
        self.names.append(key)
        self.clients[key] = Client(ask)
        of_class = ServiceClass.BEST_EFFORT if ask.best_effort else ServiceClass.STANDARD
        self.records[key] = made.record(
            key,
            owner="bench",
            state=RecordState.RELEGATED if ask.best_effort else RecordState.ACTIVE,
            service_class=of_class,
            slo=ask.slo,
            begin_by_unix_s=now_s + ask.wait_s,
            importance=ask.importance,
            arrived_unix_s=now_s,
            expires_unix_s=now_s + ask.expires_s,
            prompt_tokens=ask.prompt,
            max_tokens=ask.max_tokens,
            stream_subject=key,
        )
        sampling = Sampling(
            max_tokens=ask.max_tokens,
            output_tokens=ask.output,
            thinking_tokens=ask.thinking,
            ignore_eos=True,
            seed=number,
        )
        self.bodies[key] = Body(prompt=pack([1] * ask.prompt), sampling=sampling)
        self.place(key)

    def place(self, key: RequestKey) -> None:
        record = self.records[key]
        if state_of(record) in (State.PLACED, State.CANCELLED_PLACED, State.ENDED):
            return
        if record.cancelled:
            self.finish(key, FinishReason.CANCELLED)
        elif self.leaves_unix_s(record) <= self.line.now_s:
            self.finish(key, FinishReason.EXPIRED)
        else:
            pooled = state_of(record) is State.RELEGATED
            at = (
                life.drawn(record, "bench", REPLICA, "i", record.service_class)
                if pooled
                else life.placed(record, "bench", REPLICA, "i", attempt=record.attempt)
            )
            assert at is not None
            self.records[key] = at
            self.offer(key, at.attempt)

    def leaves_unix_s(self, record: Record) -> float:
        """As relegation has it, or else admission."""
        pooled = state_of(record) is State.RELEGATED
        return record.leaves_pool_unix_s if pooled else record.expires_unix_s

    def offer(self, key: RequestKey, attempt: int) -> None:
        self.answers[key, attempt] = 1
        self.ordered(
            "offer", self.feed_offer, as_offer(self.records[key], self.records[key].service_class)
        )

    def feed_offer(self, offer: Offer) -> None:
        if (offer.key, offer.attempt) in self.answers:
            self.feed(self.core, Offered([offer]))

    def answered(self, key: RequestKey, attempt: int, answer: OfferAnswer) -> None:
        if self.records[key].attempt != attempt or isinstance(answer, OfferAccepted):
            return
        if isinstance(answer, OfferInDoubt):
            self.in_doubt(key, attempt)
        else:
            self.back(key, attempt)

    def in_doubt(self, key: RequestKey, attempt: int) -> None:
        if self.records[key].attempt == attempt and self.records[key].verdict is None:
            self.withdraw(key, attempt)

    def withdraw(self, key: RequestKey, attempt: int) -> None:
        over = self.worker.withdraw(key, attempt)
        self.worker.check()
        if over is False:
            self.back(key, attempt)
        elif over is not True:
            self.over(over)
        self.go_on()

    def back(self, key: RequestKey, attempt: int) -> None:
        """Offers the attempt again a little later: it is not held, for certain."""
        record = self.records[key]
        if record.replica is None or record.verdict is not None or record.attempt != attempt:
            return
        asked = record.attempt >= HOPS and not record.cancelled
        if asked and state_of(record) is State.PLACED:
            after = life.relegated(record, "bench")  # as admission does where nobody takes it
        else:
            after = life.moved(record, record, "bench", self.line.now_s)
        assert after is not None
        self.records[key] = after
        if after.verdict is not None:
            self.clients[key].ends.append(after.verdict.finish_reason)
        else:
            self.line.after(0.05, self.place, key)

    def over(self, over: AttemptOver) -> None:
        """An end comes again until it is settled: the second report finds the record moved on."""
        record = self.records[over.key]
        after = life.settled(record, over, "bench", self.line.now_s)
        if after is not None:
            assert unpack_list(over.resume.tokens) == self.clients[over.key].tokens
            self.records[over.key] = after
            if after.verdict is not None:
                self.clients[over.key].ends.append(after.verdict.finish_reason)
            else:
                assert over.why not in FINAL
                self.line.after(0.05, self.place, over.key)
        self.worker.settled(over.key, over.attempt)

    def finish(self, key: RequestKey, reason: FinishReason) -> None:
        record = self.records[key]
        self.records[key] = ended(record, reason, record.resume, self.line.now_s)
        self.clients[key].ends.append(reason)

    def receive(self, key: RequestKey, delta: Delta) -> None:
        client = self.clients[key]
        assert not client.ends, "tokens after the end"
        assert delta.attempt >= client.attempt, "tokens of an attempt that was over"
        assert delta.attempt == self.records[key].attempt
        assert delta.offset == len(client.tokens), "a gap or a doubling"
        client.attempt = delta.attempt
        if not client.tokens:
            self.begins(key)
        client.tokens += delta.tokens

    def begins(self, key: RequestKey) -> None:
        """The first token of a request comes."""
        offers = [entry.offer for entry in self.worker.entries() if entry.offer.key == key]
        if any(offer.service_class is ServiceClass.BEST_EFFORT for offer in offers):
            by_s = self.records[key].begin_by_unix_s
            self.clients[key].beyond_s = max(0.0, self.line.now_s - by_s)

    # ------------------------------------------------------------ what happens to them

    def act(self, act: Act) -> None:
        key = self.names[act.who % len(self.names)] if self.names else None
        match act.what:
            case "cancel" if key is not None and self.records[key].verdict is None:
                self.records[key] = life.cancelled(self.records[key]) or self.records[key]
                self.worker.cancel(key, "because")
                self.go_on()
            case "withdraw" if (
                key is not None
                and self.records[key].replica is not None
                and self.records[key].verdict is None
            ):
                self.withdraw(key, self.records[key].attempt)
            case "lose_ack" | "lose_plan" | "lose_hold" | "false_ack":
                self.losing.append(act.what)
            case "resync":
                self.feed(self.core, Refused("the bench says so"))
            case "takeover":
                self.take_over()
            case "drain":
                self.worker.drain()
                self.go_on()
            case "leave":  # and stay after all: there is no other replica here
                leaves = replace(self.announce, leaves_unix_s=self.line.now_s + 0.2)
                self.feed(self.core, Heartbeat(leaves, receivers=1))
                self.line.after(0.1, self.stay)
            case _:
                pass

    def stay(self) -> None:
        """The replica stays after all. A core that is out of sync does not hear it."""
        self.feed(self.core, Heartbeat(self.announce))
        if not self.core.synced:
            self.line.after(0.1, self.stay)

    # ------------------------------------------------------------ looking

    def look(self, view: View) -> None:
        """Check what holds for every view; while nothing moves, it shows the worker's state."""
        self.watch(view)
        assert view.kv_free_blocks >= 0
        decode = view.phase == Phase.DECODE
        assert (view.computed_tokens[view.phase == Phase.WAITING] == 0).all()
        assert (view.computed_tokens[~decode] < view.target_tokens[~decode]).all(), (
            "a prefill without anything left"
        )
        assert (view.generated_tokens[decode] > 0).all()
        made = view.generated_tokens > 0
        assert (np.isfinite(view.newest_token_unix_s) == made).all(), "a token without an instant"
        assert (view.newest_token_unix_s[made] <= view.start_unix_s + 1e-9).all(), "a token to come"
        quiet = not (
            self.in_flight
            or self.blind
            or self.worker.running
            or self.worker.waiting_plans
            or self.worker.closing
        )
        # after a resync the picture may be old until a plan shows it
        if quiet and self.world.depth == 1 and self.resyncs == 1:
            entries = {e.slot: e for e in self.worker.entries()}
            for i, slot in enumerate(view.slot.tolist()):
                seen, offer = (
                    (view.computed_tokens[i], view.generated_tokens[i]),
                    entries[slot].offer,
                )
                assert seen == (entries[slot].computed_tokens, entries[slot].generated_tokens)
                paces_s = (
                    offer.slo.pace_s(offer.thinking),
                    offer.slo.tightest_pace_s(offer.thinking),
                )
                assert (view.thinking[i], view.tbt_s[i], view.tightest_tbt_s[i]) == (
                    offer.thinking,
                    *paces_s,
                ), "another stage"
                due_s = offer.next_due_unix_s
                assert (
                    view.next_due_unix_s[i] == due_s or abs(view.next_due_unix_s[i] - due_s) < 1e-6
                ), "another deadline"
                assert view.newest_token_unix_s[i] == offer.newest_token_unix_s, "another token"

    def run_all(self) -> None:
        """Runs until every request has ended. Raises AssertionError if one does not."""
        steps = 0
        while self.to_come or any(not c.ends for c in self.clients.values()):
            steps += 1
            assert self.line.next_s < float("inf"), f"stalled: {self.story()}"
            assert steps < STEPS, f"no end in sight: {self.story()}"
            self.line.step()
        for number, (key, client) in enumerate(self.clients.items()):
            ask = client.ask
            assert len(client.ends) == 1, f"{key} ended {client.ends}"
            assert client.tokens == [
                readable_token(number, n) for n in range(len(client.tokens))
            ], f"{key}: other tokens"
            whole = min(ask.output, ask.max_tokens)
            assert len(client.tokens) <= whole
            self.check_stages(key, ask, len(client.tokens))
            if client.ends[0] in (FinishReason.STOP, FinishReason.LENGTH):
                assert len(client.tokens) == whole
                assert client.ends[0] == (
                    FinishReason.STOP if ask.output <= ask.max_tokens else FinishReason.LENGTH
                )

    def check_stages(self, key: RequestKey, ask: Ask, made: int) -> None:
        """The measure, whatever moved the request, knows when its thinking ended, and has the
        deadlines of its stages.
        """
        measure, slo = self.records[key].resume.measure, ask.slo
        if not made or not slo.thinks:
            return
        wanted = ask.thinking or 0  # this model has no token that ends it
        assert measure.thinking_tokens == (wanted if made >= wanted else None), (
            f"{key}: thought for {measure.thinking_tokens}"
        )
        anchor_s = (
            self.records[key].arrived_unix_s + slo.ttft_s
            if slo.ttft_s is not None
            else measure.first_unix_s
        )
        thinking = max(0, min(made, wanted - 1))  # steps to a token that is thinking
        response = made - thinking
        due_s = (
            anchor_s
            + thinking * slo.pace_s(True)
            + (response * slo.pace_s(False) if response else 0.0)
        )
        assert measure.next_due_unix_s == due_s or abs(measure.next_due_unix_s - due_s) < 1e-6, (
            f"{key}: another deadline"
        )

    def story(self) -> str:
        open_ = {
            k: (r.state, r.attempt, r.service_class.value)
            for k, r in self.records.items()
            if r.verdict is None
        }
        return (
            f"at {self.line.now_s:.3f} s: {open_}; held {self.worker.entries()}; "
            f"synced {self.core.synced}; plans {self.plans}"
        )
