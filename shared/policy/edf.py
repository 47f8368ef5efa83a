"""Earliest deadline first, with chunked prefill (Sarathi-EDF in QoServe section 4)."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from shared.policy import chunk
from shared.policy.fit import accept_what_fits
from shared.policy.router import RouterName, make_router
from shared.policy.seam import Admission, Choice, Declared, Observation, View
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chunk_tokens: Annotated[int, Meta(ge=1)] = 256  # of one iteration, decodes included (QoServe section 4, shared clusters)
    router: RouterName = "attainable"


class Edf:
    """Decodes, then prefills by the sooner of next-token and TTLT deadline, best-effort ones last. Never relegates, learns nothing."""

    name = "edf"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        self._chunk_tokens = settings.chunk_tokens
        self._router = make_router(settings.router)

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return accept_what_fits(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        decodes = chunk.decoding(view)
        queue = (view.phase != chunk.DECODE).nonzero()[0]
        due = np.minimum(view.next_due_unix_s[queue], view.last_due_unix_s[queue])
        order = queue[np.lexsort((view.slot[queue], view.arrived_unix_s[queue], due, view.best_effort[queue]))]
        return [chunk.fill(view, decodes, order, limit_tokens=self._chunk_tokens - len(decodes.rows))]

    def observe(self, seen: Observation) -> None:
        pass

    def route(self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random) -> Sequence[ReplicaId]:
        return self._router(offer, digests, rng)
