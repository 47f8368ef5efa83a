"""Describes the deployment that serves a simulation: a policy over replicas of a profile."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from loadgen.simulator.elastic.law import Scaling
from loadgen.simulator.latency import LATENCIES, Latency
from loadgen.simulator.misjudged import BatchTime
from shared.core.admission.admission import AdmissionSettings
from shared.core.relegation.relegation import RelegationSettings
from shared.perf.draft import DRAFT, DraftCost
from shared.routing.pipeline import Router
from shared.vocabulary import Role

# The default of the mean probability that the first token of a draft is accepted: a choice of
# ours.
ACCEPTANCE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """The limits of a replica. `kv_blocks` 0: the number that the profile states. `host_kv_tokens`:
    of KV that its host's memory keeps.
    """

    kv_blocks: int = 0
    block_tokens: int = 16
    context_tokens: int = 8192
    max_slots: int = 16_384  # as the papers' queues: without a limit that is ever reached
    host_kv_tokens: int = 0

    @property
    def kv_tokens(self) -> int | None:
        """The KV's tokens; None: as the profile states them."""
        return self.kv_blocks * self.block_tokens or None

    def resolved(self, kv_capacity_tokens: int) -> "ReplicaFacts":
        """These limits, with `kv_blocks` from the profile's KV capacity and a context that fits."""
        kv_blocks = self.kv_blocks or kv_capacity_tokens // self.block_tokens
        context_tokens = min(self.context_tokens, kv_blocks * self.block_tokens)
        return replace(self, kv_blocks=kv_blocks, context_tokens=context_tokens)


class Outage(NamedTuple):
    """A worker that dies at `from_s`, on the arrivals' clock, and is back, empty, `for_s` later."""

    replica: int  # counted from 0
    from_s: float
    for_s: float = math.inf


class EngineFacts(NamedTuple):
    """A replica's true engine: its profile, by name or path, and its draft's fractions of it."""

    profile: str
    draft: DraftCost
    # The most drafts of a chain, for an engine that verifies no trees, as vLLM; 0: trees.
    longest_chain: int = 0
    batch_s: BatchTime | None = None  # the seconds of an iteration; None: as its profile says


class ServedModel(NamedTuple):
    """One of several models: its name in requests, and the profile of its replicas."""

    name: str
    profile: str
    replicas: int = 1
    share: float = 1.0  # of the requests that name no model, beside the other models


@dataclass(frozen=True, slots=True)
class Deployment:
    """A policy with its settings, and `replicas` of one profile.

    draft: the cost of a draft model for policies that speculate, in fractions of the target's
        times; 0: there is none.
    acceptance: the mean probability that its first token is accepted (acceptance.py).
    hand_back: relegated requests that have not begun go back to the relegation service.
    engine: the true engine, where it is not what the planners take it for: `profile` and
        `draft`.
    engine_times: the factor by which the engine's iterations (without drafting) take longer than
        the profile says.
    length_times: the factor by which policies see the outputs of ended requests lengthened.
    outages: the deaths of workers.
    models: several models, in place of `profile` and `replicas`. Their replicas are numbered in
        this order, and each draft costs what the profile states, unless `draft` is 0.
    scaling: replicas come and go; `replicas` serve from the start.
    router: makes the router, in place of the policy's own.
    prefixes_late_s: how old the prefixes are that routers hear of.
    roles: of each model's replicas in turn, the last one of the rest; empty: each does both.
    link_gbit_s: the link of each replica, over which KV comes from and goes to others, in 10^9 bits
        a second each way; 0: KV stays where it is.
    """

    policy: str
    profile: str
    replicas: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    latency: Latency = LATENCIES["none"]
    facts: ReplicaFacts = ReplicaFacts()
    draft: DraftCost = DRAFT
    acceptance: float = ACCEPTANCE
    hand_back: bool = True
    engine: EngineFacts | None = None
    engine_times: float = 1.0
    length_times: float = 1.0
    outages: Sequence[Outage] = ()
    scaling: Scaling | None = None
    router: Callable[[], Router] | None = None
    prefixes_late_s: float = 0.0
    roles: Sequence[Role] = ()
    link_gbit_s: float = 0.0
    admission: AdmissionSettings | None = None
    relegation: RelegationSettings | None = None
    models: Sequence[ServedModel] = ()

    @property
    def served(self) -> Sequence[ServedModel]:
        """Its models; a single one has no name."""
        return self.models or (ServedModel("", self.profile, self.replicas),)

    def role_of(self, nth: int) -> Role:
        """The role of a model's n-th replica."""
        return self.roles[min(nth, len(self.roles) - 1)] if self.roles else Role.BOTH
