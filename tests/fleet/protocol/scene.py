"""The parameters of a simulated schedule, which world.py plays, and what a client sees of it."""

from dataclasses import dataclass, field
from random import Random

from services.admission.config import AdmissionConfig
from shared.schemas import End, GenerateRequest, Sampling
from shared.vocabulary import Role, Slo
from tests.simulated.broker import Faults

CALM = Faults()
STORM = Faults(
    latency_s=(0.0001, 0.002),
    spike=0.01,
    spike_s=0.2,
    loss=0.02,
    duplicate=0.02,
    reorder=0.02,
    store_lost=0.005,
    store_silent=0.005,
    store_late=0.002,
    publish_yields=0.2,
)

ALIKE = 3  # prompts begin in so many ways where engines keep prefixes


@dataclass(frozen=True)
class Scene:
    """The parameters of a schedule."""

    replicas: int = 2
    planners: int = 2
    admissions: int = 2
    relegations: int = 2
    requests: int = 12
    over_s: float = 2.0  # arrivals and misfortunes fall into this time
    policy: str = "qoserve"
    settings: dict[str, str] = field(default_factory=dict)  # of the policy
    kv_blocks: int = 400
    max_slots: int = 16
    snapshot_acks: int = 20
    faults: Faults = STORM
    kills: int = 3
    pauses: int = 2
    restarts: int = 1  # of the broker
    cancels: int = 2
    deletions: int = 0  # of open records, by hand
    # replicas whose engine has min-p; if any has, every second request needs it
    able: tuple[str, ...] = ()
    # the models of the replicas, in turn; requests name them, in turn
    models: tuple[str, ...] = ("m",)
    return_s: float = 300.0  # until a model without a replica has left
    skew_s: float = 0.0  # the clock of every second process is so much ahead, or behind
    keeps_time: bool = False  # every process follows the time of the fleet, as live
    # half-way the clock of the broker and those of half the hosts jump by so much
    jump_s: float = 0.0
    acks: str = ""  # those of r0 are `slow` or `wrong` (tests/chaos/sabotage)
    full_s: float = 0.0  # for so long the store takes no writes
    prefixes: bool = False  # engines keep prefixes, and prompts begin alike
    roles: tuple[str, ...] = ()  # of the replicas, in turn; KV moves between them then
    breaks: float = 0.0  # the part of the pieces of KV with which its way breaks off
    settle_s: float = 120.0  # the longest it may take until everything has ended, in calm

    @property
    def admission(self) -> AdmissionConfig:
        return AdmissionConfig(
            policy=self.policy, sweep_s=2.0, lost_limit=100, return_s=self.return_s
        )

    def model_of(self, replica: str) -> str:
        return self.models[int(replica[1:]) % len(self.models)]

    def role_of(self, replica: str) -> Role:
        return Role(self.roles[int(replica[1:]) % len(self.roles)]) if self.roles else Role.BOTH

    def model_asked(self, n: int) -> str | None:
        """The model that request n names; None where there is only one."""
        return self.models[n % len(self.models)] if len(self.models) > 1 else None

    def request(self, n: int, rng: Random) -> GenerateRequest:
        """Draw request n."""
        prompt = rng.choice((3, 40, 300, 900))
        output = rng.choice((1, 2, 7, 20))
        most, thinking = output + rng.choice((0, 50)), rng.randint(0, output)
        sampling = Sampling(
            max_tokens=most,
            output_tokens=output,
            thinking_tokens=thinking,
            ignore_eos=True,
            min_p=0.1 if self.able and n % 2 else 0.0,
        )
        slos = (
            Slo(ttft_s=0.3, tbt_s=0.05),
            Slo(ttft_s=0.02, tbt_s=0.02),
            Slo(ttlt_s=5.0),
            Slo(ttlt_s=0.1),
        )
        slo = rng.choice((*slos, Slo(ttft_s=0.3, thinking_tbt_s=0.03, tbt_s=0.1)))
        words = Random(n % ALIKE) if self.prefixes else rng
        return GenerateRequest(
            request_id=f"q{n}",
            model=self.model_asked(n),
            token_ids=[words.randrange(32, 127) for _ in range(prompt)],
            sampling=sampling,
            slo=slo,
            importance=rng.choice((0.5, 1.0)),
            allow_relegation=rng.random() > 0.1,
        )

    def suits(self, replica: str, request: GenerateRequest) -> bool:
        """Tells whether the replica has what the request needs, its model included."""
        able = not request.sampling.min_p or replica in self.able
        return able and request.model in (None, self.model_of(replica))


@dataclass
class Seen:
    """The events of one request, as its client saw them."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[End] = field(default_factory=list)
    refused: bool = False  # at the door
