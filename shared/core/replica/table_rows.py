"""The columns of the request table: those that policies see, and those that only the core sees."""

from dataclasses import dataclass, fields
from typing import get_type_hints

import numpy as np

from shared.columns import Indices, Ints
from shared.policy.seam import Bools, Floats, Phase, Rows

# numpy takes an IntEnum five times as slowly
WAITING, PREFILL, DECODE = int(Phase.WAITING), int(Phase.PREFILL), int(Phase.DECODE)


@dataclass(slots=True, eq=False)
class TableRows(Rows):
    """The columns that policies see, and others that only the core sees."""

    # how often the request's KV was dropped: a plan sent before does not count for its present KV
    restarts: Ints
    # blocks of the draft model's KV, at most; 0 where that KV has no capacity of its own
    draft_held_blocks: Ints
    expires_unix_s: Floats
    begin_by_unix_s: Floats  # the instant by which a best-effort request must have its first token
    # for shared/core/replica/fairness.py: a number for the request's tenant, and its turn
    tenant: Ints
    turn: Floats


# by the annotation as a whole, since its parts differ between versions of numpy
_DTYPES: dict[object, type[np.generic]] = {
    Ints: np.int32,
    Indices: np.intp,
    Floats: np.float64,
    Bools: np.bool_,
}


COLUMNS = {name: _DTYPES[kind] for name, kind in get_type_hints(TableRows).items()}
VIEWED = tuple(field.name for field in fields(Rows))  # in the order that View takes them
