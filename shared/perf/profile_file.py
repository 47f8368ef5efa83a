"""Reads profile files: JSON, shipped or the operator's. Each states its origin and its error."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError
from shared.perf.draft import DRAFT, DraftCost
from shared.perf.forms import PiecewiseTokens, SlosServeRoofline, SolaPolynomial, TokenTable
from shared.perf.iteration_time import Profile
from shared.perf.stratified import StratifiedLinear
from shared.vocabulary import Count, FromOne

FOLDER = Path(__file__).parent / "profiles"

LINK_BYTES_S = 25e9  # from the host's memory to a GPU, over PCIe 4 x16

Fraction = Annotated[float, Meta(ge=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Form = StratifiedLinear | TokenTable | PiecewiseTokens | SlosServeRoofline | SolaPolynomial


class FitError(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fit's absolute relative errors against `against`; None where not stated."""

    against: NonEmpty
    mape: Fraction | None = None
    p95: Fraction | None = None
    worst: Fraction | None = None
    mape_decode_only: Fraction | None = None
    mape_mixed: Fraction | None = None
    mape_prefill_only: Fraction | None = None


class ProfileFile(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A profile as it is stored. `coefficients` has its `form` as tag. KV figures are per GPU."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    gpu: NonEmpty
    model: NonEmpty
    tensor_parallel: FromOne
    kv_capacity_tokens: FromOne
    kv_bytes_per_token: Count  # 0 if not stated
    overhead_s: Annotated[float, Meta(ge=0)]  # per iteration, on top of what the form gives
    error: FitError
    provenance: NonEmpty
    coefficients: Form
    draft: DraftCost = DRAFT  # of the draft model that goes with this model
    # for a token's KV to come from the host's memory; None: as `kv_bytes_per_token` over PCIe
    kv_load_s: Fraction | None = None

    @property
    def token_load_s(self) -> float:
        """Seconds for a token's KV to come from the host's memory."""
        if self.kv_load_s is None:
            return self.kv_bytes_per_token / LINK_BYTES_S
        return self.kv_load_s

    def token_move_s(self, link_gbit_s: float) -> float:
        """Seconds for a token's KV, of all its GPUs together, over a link; 0 without one."""
        bits = 8 * self.kv_bytes_per_token * self.tensor_parallel
        return bits / (1e9 * link_gbit_s) if link_gbit_s else 0.0

    def profile(self) -> Profile:
        return self.coefficients.profile(self.name, self.overhead_s)


def names() -> list[str]:
    """The shipped profiles, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name_or_path: str) -> ProfileFile:
    """A profile by name, or by path (a slash, or .json). Raises ConfigError, naming the fault."""
    if "/" in name_or_path or name_or_path.endswith(".json"):
        path = Path(name_or_path)
    elif name_or_path in names():
        path = FOLDER / f"{name_or_path}.json"
    else:
        raise ConfigError(
            f"no profile named {name_or_path!r}; shipped are {', '.join(names())}; "
            "or give the path of a .json file"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProfileFile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a profile: {error}") from error


def load(name_or_path: str) -> Profile:
    """The profile itself. Raises: ConfigError, as `read`."""
    return read(name_or_path).profile()
