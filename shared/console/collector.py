"""The collector: makes a picture of the last minutes of a fleet, for the console, from the fleet's
own messages. Sans-IO: messages and time in, a picture out; its memory is bounded. Only `Ended` and
answers to `Roster` are sent for it.
"""

import math
from collections import Counter, OrderedDict

from shared.columns import unpack_list
from shared.console.life import Life
from shared.console.picture import Iteration, LifePicture, Picture, TierPicture
from shared.console.replica_watch import SLOTS_LIMIT, ReplicaWatch
from shared.console.rolling import WINDOW_S, Rolling
from shared.console.slack import EDGES_S
from shared.rules.tiers import TierSet
from shared.schemas import (
    Announce,
    BatchPlan,
    Digest,
    Ended,
    PlanAck,
    PoolDigest,
    ReplicasNeeded,
    RosterAnswer,
)
from shared.vocabulary import MOST_REPLICAS, ReplicaId, RequestKey, Slo

FRESH_S = 2.0  # a replica whose digest is older is shown as silent
GONE_S = 30.0  # and is shown no more
TIERS_LIMIT = 32
OTHER = "other"  # the name for all tiers beyond TIERS_LIMIT
MODELS_LIMIT = 16
OF_MODEL = "model {}"  # no tier has a name with a space
HELD_LIMIT, ENDED_LIMIT = 4096, 512  # lives: about 10 KB each
ROWS = 256  # requests in one picture
POINTS = 30  # of a tier's history
FRESH_NEED_S = 5.0  # a need is told each second
STALE_S = 5.0  # a request that its planner does not name, and of which nothing was heard so long


class Tier:
    def __init__(self, slo: Slo | None) -> None:
        self.slo = slo
        self.rolling = Rolling()


class Collector:
    def __init__(self, now_unix_s: float, tiers: TierSet | None = None) -> None:
        """`tiers`: the tiers that are shown before anything is heard of them."""
        self._since_unix_s = now_unix_s
        self._tiers = {
            name: Tier(tier.slo) for name, tier in (tiers.tiers if tiers else {}).items()
        }
        self._models: dict[str, Tier] = {}  # the same of each model, over all tiers
        self._replicas: dict[ReplicaId, ReplicaWatch] = {}
        self._lives: dict[RequestKey, Life] = {}
        self._ended: OrderedDict[RequestKey, Life] = OrderedDict()
        self._newest = 0
        self._pool_requests = 0
        self._needed: dict[str, ReplicasNeeded] = {}  # by model

    # ------------------------------------------------------------ messages in

    def hear_digest(self, digest: Digest, now_unix_s: float) -> None:
        watch = self._watch(digest.replica)
        if watch is None:
            return
        if digest.incarnation != watch.incarnation:
            watch.begin(digest.incarnation)
        watch.report(digest, now_unix_s)

    def hear_announce(self, announce: Announce) -> None:
        watch = self._watch(announce.replica)
        if watch is not None:
            watch.announce = announce

    def hear_pool(self, pool: PoolDigest) -> None:
        self._pool_requests = sum(lane.requests for lane in pool.lanes)

    def hear_needed(self, needed: ReplicasNeeded) -> None:
        if needed.model in self._needed or len(self._needed) < TIERS_LIMIT:
            self._needed[needed.model] = needed

    def hear_plan(self, plan: BatchPlan) -> None:
        watch = self._watch(plan.replica)
        if watch is not None:
            watch.planned(plan)

    def hear_ack(self, ack: PlanAck, now_unix_s: float) -> None:
        """Take an iteration from an ack; an ack whose columns do not fit together is ignored."""
        watch = self._watch(ack.replica)
        if watch is None:
            return
        if ack.incarnation != watch.incarnation:
            watch.begin(ack.incarnation)
        if ack.ack_seq <= watch.ack_seq:
            return
        try:
            slots, computed, emitted = map(unpack_list, (ack.slots, ack.computed, ack.emitted))
            nothing = [0] * len(slots)
            drafted = unpack_list(ack.drafted) or nothing
            cached = unpack_list(ack.cached) or nothing
            orders = [unpack_list(raw) for raw in (ack.preempted, ack.relegated, ack.promoted)]
            answering = unpack_list(ack.answering)
        except ValueError:
            return
        watch.ack_seq = ack.ack_seq
        at_unix_s = ack.ended_unix_s or now_unix_s
        for held in ack.held:
            self._hold(watch, held.slot, self._life(held.key, now_unix_s))
            if held.slot in watch.by_slot:
                watch.by_slot[held.slot].hold(held, watch.name, ack.started_unix_s or at_unix_s)
        self._order(watch, orders, answering, at_unix_s)
        prefills = decodes = drafts = tokens = 0
        for slot, done, made, draft, found in zip(
            slots, computed, emitted, drafted, cached, strict=False
        ):
            tokens += made
            prefills_now = made == 0 or done > draft + 1
            if prefills_now:
                prefills += done - found
            else:
                decodes += 1
                drafts += draft
            life = watch.by_slot.get(slot)
            if life is None:
                watch.unknown.add(slot)
                continue
            if life.slo is None:
                watch.unknown.add(slot)
            life.heard_unix_s = now_unix_s
            life.computed += done
            if prefills_now:
                life.chunks.add(at_unix_s, done)
            if made > 0:
                self._emit(life, made, at_unix_s, now_unix_s)
        for slot, why in ack.ended:
            self._leave(watch, slot, why, at_unix_s)
        if ack.plan_seq:
            self._newest += 1
            predicted_s = watch.predicted_s(ack.epoch, ack.plan_seq)
            iteration = Iteration(
                self._newest, at_unix_s, ack.exec_s, predicted_s, ack.idle_s,
                max(prefills, 0), decodes, drafts,
            )  # fmt: skip
            watch.ran(iteration, tokens, now_unix_s)

    def hear_ended(self, ended: Ended, now_unix_s: float) -> None:
        verdict = ended.verdict
        for rolling in self._rollings(ended.tier, ended.slo, ended.model):
            rolling.count("offered", now_unix_s, ended.requests)
            if verdict is None:
                rolling.count("refused", now_unix_s, ended.requests)
                continue
            rolling.count("met" if verdict.slo_met else _missed(verdict.missed), now_unix_s)
            if verdict.relegated:
                rolling.count("relegated", now_unix_s)
            for name, value_s in (("ttft", verdict.ttft_s), ("ttlt", verdict.ttlt_s)):
                if value_s is not None:
                    rolling.latency(name, value_s, now_unix_s)
        if ended.key is None or verdict is None:
            return
        life = self._lives.pop(ended.key, None) or Life(ended.key, now_unix_s)
        life.tier, life.slo = ended.tier, ended.slo
        life.arrived_unix_s, life.verdict = ended.arrived_unix_s, verdict
        life.prompt_tokens = verdict.prompt_tokens
        life.event(verdict.ended_unix_s, f"ended: {verdict.finish_reason}")
        self._ended[ended.key] = life
        while len(self._ended) > ENDED_LIMIT:
            self._ended.popitem(last=False)

    def hear_roster(
        self, replica: ReplicaId, asked: list[int], answer: RosterAnswer, now_unix_s: float
    ) -> None:
        """Take the answer of the replica's planner; `asked`: the slots asked for, empty for all."""
        watch = self._replicas.get(replica)
        if watch is None:
            return
        named = set()
        for entry in answer.entries:
            named.add(entry.slot)
            life = watch.by_slot.get(entry.slot)
            if life is None or life.key != entry.key:
                if life is not None and now_unix_s - life.heard_unix_s < STALE_S:
                    continue  # the ack with the hold will tell which request has the slot
                life = self._life(entry.key, now_unix_s)
                self._hold(watch, entry.slot, life)
                if life is None:
                    continue
                life.replica, life.attempt = replica, entry.attempt
            life.name(entry)
            self._tier(entry.tier, entry.slo)
        for slot in (watch.unknown & set(asked)) if asked else set(watch.unknown):
            watch.unknown.discard(slot)
        if not asked:
            for slot, life in list(watch.by_slot.items()):
                if slot not in named and now_unix_s - life.heard_unix_s > STALE_S:
                    self._leave(watch, slot, "", now_unix_s)

    # ------------------------------------------------------------ questions and pictures out

    def questions(self, now_unix_s: float) -> list[tuple[ReplicaId, list[int]]]:
        """The replicas whose planner is to be asked now for requests, in these slots or in all."""
        found = []
        for watch in self._replicas.values():
            if now_unix_s - watch.digest_unix_s > FRESH_S:
                continue
            slots = watch.question(now_unix_s)
            if slots is not None:
                found.append((watch.name, slots))
        return found

    def picture(self, now_unix_s: float, since: int = 0) -> Picture:
        """The fleet now, with the iterations after `since`."""
        self._forget(now_unix_s)
        held_lives = [life for watch in self._replicas.values() for life in watch.by_slot.values()]
        named = [life for life in held_lives if life.slo is not None]
        # standard requests first, the most pressing on top; then best-effort ones
        named.sort(key=lambda life: (life.best_effort, life.slack_s(now_unix_s), life.key))
        pictures = (watch.picture(now_unix_s, since) for watch in self._replicas.values())
        return Picture(
            at_unix_s=now_unix_s,
            since_unix_s=self._since_unix_s,
            window_s=WINDOW_S,
            newest=self._newest,
            tiers=self._tier_pictures(named, now_unix_s),
            replicas=sorted((p for p in pictures if p is not None), key=lambda p: _natural(p.name)),
            requests=[life.row(now_unix_s) for life in named[:ROWS]],
            held=len(held_lives),
            pool_requests=self._pool_requests,
            needed=[
                each
                for each in self._needed.values()
                if now_unix_s - each.at_unix_s <= FRESH_NEED_S
            ],
            slack_edges_s=list(EDGES_S),
        )

    def life(self, key: RequestKey, now_unix_s: float) -> LifePicture | None:
        """The life of a request that a replica holds, or that ended a short while ago."""
        found = self._lives.get(key) or self._ended.get(key)
        return None if found is None else found.picture(now_unix_s)

    # ------------------------------------------------------------ helpers

    def _watch(self, replica: ReplicaId) -> ReplicaWatch | None:
        watch = self._replicas.get(replica)
        if watch is None and len(self._replicas) < MOST_REPLICAS:
            watch = self._replicas[replica] = ReplicaWatch(replica)
        return watch

    def _tier(self, name: str, slo: Slo | None) -> Tier:
        if name not in self._tiers and len(self._tiers) >= TIERS_LIMIT:
            name, slo = OTHER, None
        return self._tiers.setdefault(name, Tier(slo))

    def _rollings(self, tier: str, slo: Slo | None, model: str) -> list[Rolling]:
        """The counts of a tier, and of a model if it is known."""
        found = [self._tier(tier, slo).rolling]
        if model and (model in self._models or len(self._models) < MODELS_LIMIT):
            found.append(self._models.setdefault(model, Tier(None)).rolling)
        return found

    def _model_of(self, life: Life) -> str:
        watch = self._replicas.get(life.replica)
        return "" if watch is None or watch.digest is None else watch.digest.model

    def _life(self, key: RequestKey, now_unix_s: float) -> Life | None:
        """The life of this request; None where too many are followed already."""
        life = self._lives.get(key)
        if life is None and len(self._lives) < HELD_LIMIT:
            life = self._lives[key] = Life(key, now_unix_s)
        return life

    def _hold(self, watch: ReplicaWatch, slot: int, life: Life | None) -> None:
        before = watch.by_slot.pop(slot, None)
        if before is not None and before is not life:
            self._lives.pop(before.key, None)
        if life is not None and len(watch.by_slot) < SLOTS_LIMIT:
            watch.by_slot[slot] = life
            if life.slo is None:
                watch.unknown.add(slot)

    def _order(
        self, watch: ReplicaWatch, orders: list[list[int]], answering: list[int], at_unix_s: float
    ) -> None:
        """Note class changes, preemptions and ends of thinking."""
        for what, slots in zip(("preempted", "relegated", "promoted"), orders, strict=True):
            for slot in slots:
                life = watch.by_slot.get(slot)
                if life is None:
                    continue
                life.event(at_unix_s, what)
                if what == "preempted":
                    life.computed = 0
                else:
                    life.best_effort = what == "relegated"
        for slot in answering:
            if slot in watch.by_slot:
                watch.by_slot[slot].thinking = False

    def _emit(self, life: Life, made: int, at_unix_s: float, now_unix_s: float) -> None:
        gap_s = life.emit(made, at_unix_s)
        if not life.tier:
            return
        for rolling in self._rollings(life.tier, life.slo, self._model_of(life)):
            if gap_s is not None:
                rolling.latency("tbt", gap_s, now_unix_s)
            if made > 1:  # these tokens reach the client together
                rolling.latency("tbt", 0.0, now_unix_s, made - 1)

    def _leave(self, watch: ReplicaWatch, slot: int, why: str, at_unix_s: float) -> None:
        """An attempt is over; the request may go on elsewhere, and its end is heard separately."""
        watch.unknown.discard(slot)
        life = watch.by_slot.pop(slot, None)
        if life is None:
            return
        life.event(at_unix_s, f"left {watch.name}: {why}" if why else f"left {watch.name}")
        if self._lives.get(life.key) is life:
            life.heard_unix_s = at_unix_s

    def _forget(self, now_unix_s: float) -> None:
        for name, watch in list(self._replicas.items()):
            if watch.digest is not None and now_unix_s - watch.digest_unix_s > GONE_S:
                del self._replicas[name]
        held_lives = {
            life.key for watch in self._replicas.values() for life in watch.by_slot.values()
        }
        for key, life in list(self._lives.items()):
            if key not in held_lives and now_unix_s - life.heard_unix_s > GONE_S:
                del self._lives[key]
        for tier in (*self._tiers.values(), *self._models.values()):
            tier.rolling.forget(now_unix_s)

    def _tier_pictures(self, named: list[Life], now_unix_s: float) -> list[TierPicture]:
        """The tiers; where there are several models, also each model over all tiers."""
        running = Counter((life.tier, life.phase == "decode") for life in named)
        shown = dict(self._tiers)
        if len(self._models) > 1:
            shown |= {OF_MODEL.format(name): tier for name, tier in self._models.items()}
            running += Counter(
                (OF_MODEL.format(self._model_of(life)), life.phase == "decode") for life in named
            )
        found = []
        for name, tier in shown.items():
            counts, rolling = tier.rolling.counts, tier.rolling
            missed = {
                bound: counts[bound]
                for bound in ("ttft", "tbt", "ttlt", "unfinished", "refused")
                if counts[bound]
            }
            found.append(
                TierPicture(
                    name=name,
                    slo=tier.slo,
                    offered=counts["offered"],
                    met=counts["met"],
                    missed=missed,
                    relegated=counts["relegated"],
                    ttft=rolling.quantiles("ttft"),
                    tbt=rolling.quantiles("tbt"),
                    ttlt=rolling.quantiles("ttlt"),
                    waiting=running[name, False],
                    running=running[name, True],
                    history=rolling.history("met", "offered", now_unix_s, POINTS),
                )
            )
        return found


def _missed(bound: str) -> str:
    return bound or "unfinished"


def _natural(name: str) -> tuple[str, float]:
    """A key for sorting by which r2 comes before r10."""
    head = name.rstrip("0123456789")
    return head, float(name[len(head) :] or -math.inf)
