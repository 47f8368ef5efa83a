"""Tells which replicas, models and LoRA adapters live, by the digests that planners publish."""

from msgspec import UNSET, Struct, UnsetType, field

from shared.clock import Clock
from shared.features import STRUCTURED
from shared.schemas import Digest
from shared.vocabulary import ReplicaId


class Fleet:
    """The fleet by its digests, dated by their arrival here: other hosts' clocks do not count."""

    def __init__(self, clock: Clock, fresh_s: float) -> None:
        self._clock = clock
        self._fresh_s = fresh_s
        self._heard: dict[ReplicaId, tuple[float, Digest]] = {}
        self._first_heard_unix_s: dict[str, float] = {}  # by model and adapter

    def hear(self, digest: Digest) -> None:
        now_unix_s = self._clock.unix_s()
        self._heard[digest.replica] = (now_unix_s, digest)
        for name in (digest.model, *digest.adapters):
            self._first_heard_unix_s.setdefault(name, now_unix_s)

    def models(self) -> dict[str, float]:
        """Models with a digest at most `fresh_s` old, each with the instant of its first digest."""
        return {
            model: self._first_heard_unix_s[model]
            for model in sorted({digest.model for digest in self._fresh()})
        }

    def accepting(self) -> bool:
        """Tells whether some live replica takes new requests."""
        return any(digest.accepting for digest in self._fresh())

    def adapters(self) -> dict[str, tuple[str, float]]:
        """Live adapters: for each its model and the instant of its first digest."""
        found = {name: digest.model for digest in self._fresh() for name in digest.adapters}
        return {name: (found[name], self._first_heard_unix_s[name]) for name in sorted(found)}

    def context_tokens(self, model: str) -> int:
        """The longest context of a live replica of this model; 0 where none is told."""
        return max(
            (digest.context_tokens for digest in self._fresh() if digest.model == model), default=0
        )

    def knows(self, name: str) -> bool:
        """Tells whether a live replica has a model or an adapter of this name."""
        return any(name in (digest.model, *digest.adapters) for digest in self._fresh())

    def names(self) -> list[str]:
        """The models and adapters that live replicas have."""
        return sorted({name for d in self._fresh() for name in (d.model, *d.adapters)})

    def holds_formats(self) -> bool:
        """Tells whether some live replica can hold an answer to a format."""
        return any(STRUCTURED in digest.features for digest in self._fresh())

    def default_model(self) -> str:
        """The model's name where the client named none; empty where no replica is alive."""
        return next(iter(self.models()), "")

    def _fresh(self) -> list[Digest]:
        oldest_unix_s = self._clock.unix_s() - self._fresh_s
        self._heard = {
            replica: seen for replica, seen in self._heard.items() if seen[0] >= oldest_unix_s
        }
        return [digest for _, digest in self._heard.values()]


class Model(Struct, frozen=True, kw_only=True):
    id: str
    created: int  # unix seconds
    object: str = "model"
    owned_by: str = "slackline"
    # tokens of prompt and answer that a replica of it has, as vLLM tells them
    max_model_len: int | UnsetType = UNSET
    parent: str | UnsetType = UNSET  # the model that a LoRA adapter adapts


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model] = field(default_factory=list)
    object: str = "list"
