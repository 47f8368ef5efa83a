"""The profile (iteration times) of a worker as its heartbeat announces it: the name of a shipped
one, or the profile itself. A path is never announced: elsewhere it names another file.
"""

from functools import lru_cache
from math import isfinite

import msgspec
from msgspec.structs import replace

from shared.errors import ConfigError
from shared.perf import draft
from shared.perf import profile_file as store
from shared.perf.iteration_time import Profile
from shared.perf.profile_file import ProfileFile
from shared.perf.shape import BatchShape
from shared.schemas import Announce

LIMIT_BYTES = 16_384  # of an announced profile; those that we measure take about 900
LONGEST_S = 1e6  # of any iteration; ours are seconds at most
REMEMBERED = 64  # unfolding takes 5 ms (50 at the most), and a request may ask for it

PROBES = (
    BatchShape(decodes=1),
    BatchShape().with_chunk(1, 0),
    BatchShape(4096, decodes=256, decode_context=1_000_000, drafts=4096).with_chunk(
        16_384, 100_000
    ),
)


def profile_of(announce: Announce) -> Profile:
    """The profile a worker's planner begins with. Raises ConfigError for a bad one."""
    return _own(announce.fitted) if announce.fitted is not None else _shipped(announce.profile)


def file_of(announce: Announce) -> ProfileFile:
    """This worker's profile as a file, with its draft's cost (0: none), and what it takes to load
    KV if it does. Raises as `profile_of`.
    """
    profile_of(announce)
    file = announce.fitted if announce.fitted is not None else store.read(announce.profile)
    load_s = announce.kv_load_s if announce.host_kv_blocks else file.kv_load_s
    return replace(file, draft=announce.draft, kv_load_s=load_s)


def as_announced(name_or_path: str) -> tuple[str, ProfileFile | None]:
    """The profile's announced name, and its file unless it is shipped. May raise ConfigError."""
    if name_or_path in store.names():
        return name_or_path, None
    file = store.read(name_or_path)
    _own(file)
    return file.name, file


def draft_of(announce: Announce) -> draft.Draft | None:
    """The cost of the worker's draft model; None without one. Raises ConfigError."""
    return draft.draft_of(profile_of(announce), announce.draft)


@lru_cache(maxsize=REMEMBERED)
def _shipped(name: str) -> Profile:
    if name not in store.names():
        raise ConfigError(
            f"no profile named {name[:64]!r} is shipped; a worker announces its own itself"
        )
    return store.load(name)


def _own(file: ProfileFile) -> Profile:
    if len(msgspec.msgpack.encode(file)) > LIMIT_BYTES:
        raise ConfigError(f"the announced profile {file.name!r} is longer than {LIMIT_BYTES} bytes")
    profile = _unfolded(file)
    if profile is None:
        raise ConfigError(f"the announced profile {file.name!r} gives no durations")
    return profile


@lru_cache(maxsize=REMEMBERED)
def _unfolded(file: ProfileFile) -> Profile | None:
    """The profile; None if it gives no durations, which is remembered, too."""
    if not _finite(msgspec.to_builtins(file)):
        return None
    profile = file.profile()
    if not all(0 < profile.batch_s(shape) < LONGEST_S for shape in PROBES):
        return None
    return profile


def _finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(_finite(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(part) for part in value)
    return not isinstance(value, float) or isfinite(value)
