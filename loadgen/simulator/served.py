"""A model as a run serves it."""

from collections.abc import Callable
from dataclasses import dataclass

from loadgen.simulator.deployment import Deployment, ReplicaFacts, ServedModel
from loadgen.simulator.misjudged import stretched
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.draft import Draft, draft_of
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.vocabulary import Role


@dataclass(frozen=True, slots=True)
class Served:
    """A model as a run serves it: what planners take its replicas for, and their true engine."""

    name: str
    announced: str
    profile_name: str
    profile: Profile
    draft: Draft | None
    facts: ReplicaFacts
    batch_s: Callable[[BatchShape], float]
    engine_draft: Draft | None
    longest_chain: int
    kv_load_s: float
    kv_move_s: float  # 0: its KV stays where it is

    @staticmethod
    def of(model: ServedModel, deployment: Deployment) -> "Served":
        """Raises ConfigError for an unknown profile, an impossible draft, KV whose size is not
        stated, or roles that these replicas cannot have.
        """
        if len(deployment.roles) > model.replicas:
            raise ConfigError(f"there are more roles than replicas of {model.profile}")
        if set(deployment.roles) - {Role.BOTH} and not deployment.link_gbit_s:
            raise ConfigError("replicas with roles need a link between them")
        file, engine, times = (
            profiles.read(model.profile),
            deployment.engine,
            deployment.engine_times,
        )
        if deployment.link_gbit_s and not file.kv_bytes_per_token:
            raise ConfigError(f"{model.profile} does not say how many bytes the KV of a token has")
        profile = file.profile()
        cost = file.draft if model.name and deployment.draft else deployment.draft
        draft = draft_of(profile, cost)
        own, own_draft = profile, draft
        if engine is not None:
            own = profiles.load(engine.profile)
            own_draft = draft_of(own, engine.draft)
        batch_s = own.batch_s if engine is None or engine.batch_s is None else engine.batch_s
        return Served(
            name=model.name,
            announced=model.name or file.model,
            profile_name=model.profile,
            profile=profile,
            draft=draft,
            facts=deployment.facts.resolved(file.kv_capacity_tokens),
            batch_s=batch_s if times == 1.0 else stretched(batch_s, times),
            engine_draft=own_draft,
            longest_chain=0 if engine is None else engine.longest_chain,
            kv_load_s=file.token_load_s,
            kv_move_s=file.token_move_s(deployment.link_gbit_s),
        )
