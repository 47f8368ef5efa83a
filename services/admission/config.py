"""The settings of an admission process: section `admission`, or SLACKLINE_ADMISSION_<FIELD>."""

from shared.policy import registry
from shared.process.configuration import Connected, Constant
from shared.rules.model_names import Aliases
from shared.rules.rules import TenantSource, TierSource


class AdmissionConfig(Connected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = registry.DEFAULT
    """It plans each iteration, and its router says which replica is asked first."""
    settings: dict[str, str] = {}
    """Settings of the policy, each as text."""
    tiers: TierSource = ""
    """The tiers, written here as `[tiers.NAME]`; or a built-in set, or a .toml or .json file."""
    default_tier: str = ""
    """The tier of a request that names none. Empty: that of the set, or the first one written."""
    tenants: TenantSource = ""
    """The limits of tenants, written here as `[tenants.NAME]`; or a .toml file."""
    model: str = ""
    """A shipped model or a folder, for its tokenizer; empty: one token a byte."""
    models: str = ""
    """Further ones, with commas between them, each a folder or NAME=FOLDER."""
    default_model: str = ""
    """The model of a request that names none. Empty: the only one; with several it is refused."""
    aliases: Aliases = {}
    """Further names of models and LoRA adapters, written here as `[aliases]`: name = model."""
    return_s: float = 300.0
    """The time in which a lost replica may come back. A model without one for longer has left, if
    another is served.
    """
    homeless_s: float = 10.0
    """A request is relegated if no replica is up for this long."""
    open_limit: int = 20_000
    """Requests under way at once, shared by the tenants that have any, by their weights. Further
    ones are refused with a Retry-After.
    """
    receive_limit_bytes: int = 32 * 1024 * 1024
    """All messages being read at once, as sent, shared likewise. In memory, a prompt of token ids
    takes up to nine times as much. A single message may be larger.
    """
    pool_limit: int = 20_000
    """Best-effort requests that wait, shared alike by the tenants that have any."""
    lost_s: float = 3.0
    """A worker that is silent for this long is fenced."""
    sweep_s: float = 15.0
    """The time between two sweeps of the open records, at which admissions take turns."""
    drain_s: float = 10.0
    """The longest drain. The process ends within 5 s of it, whatever NATS does."""

    # ------------------------------------------------------------ constants

    # Offers of one request before it is best-effort.
    hop_limit: Constant[int] = 4
    # Requests being read at once, shared likewise.
    receive_limit: Constant[int] = 256
    # Attempts whose replica was lost before a request fails.
    lost_limit: Constant[int] = 5
