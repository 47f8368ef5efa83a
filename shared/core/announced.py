"""The profile of a worker as it is announced: one it has fitted itself, or the name or path of a
file.
"""

from functools import lru_cache
from math import isfinite

import msgspec

from shared.errors import ConfigError
from shared.perf import draft
from shared.perf import profile_file as store
from shared.perf.forms import PiecewiseTokens
from shared.perf.iteration_time import Profile
from shared.perf.profile_file import ProfileFile
from shared.perf.shape import BatchShape
from shared.schemas import Announce

# of a fitted profile; ours take about 900. What is longer would take long to unfold
LIMIT_BYTES = 4096
LONGEST_S = 1e6  # of any iteration; ours are seconds at most
REMEMBERED = 64  # unfolding takes 5 ms, and a request may ask for it

PROBES = (
    BatchShape(decodes=1),
    BatchShape().with_chunk(1, 0),
    BatchShape(decodes=256, decode_context=1_000_000).with_chunk(16_384, 100_000),
)


def profile_of(announce: Announce) -> Profile:
    """The profile that this worker's planner begins with. Raises: ConfigError for a name or path
    that is no profile, or a fitted one that no worker of ours would send.
    """
    return _fitted(announce.fitted) if announce.fitted is not None else store.load(announce.profile)


def draft_of(announce: Announce) -> draft.Draft | None:
    """The cost of its draft model; None without one. Raises: as `profile_of`, and ConfigError for
    impossible fractions.
    """
    return draft.draft_of(profile_of(announce), announce.draft)


@lru_cache(maxsize=REMEMBERED)
def _fitted(file: ProfileFile) -> Profile:
    if len(msgspec.msgpack.encode(file)) > LIMIT_BYTES:
        raise ConfigError(f"the announced profile {file.name!r} is longer than {LIMIT_BYTES} bytes")
    if not isinstance(file.coefficients, PiecewiseTokens):
        raise ConfigError(f"the announced profile {file.name!r} is of a form that no worker fits")
    profile = file.profile()
    if not all(0 < profile.batch_s(shape) < LONGEST_S for shape in PROBES) or not _finite(
        msgspec.to_builtins(file)
    ):
        raise ConfigError(f"the announced profile {file.name!r} gives no durations")
    return profile


def _finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(_finite(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(part) for part in value)
    return not isinstance(value, float) or isfinite(value)
