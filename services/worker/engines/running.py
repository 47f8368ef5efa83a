"""A request as the torch engine has it."""

from dataclasses import dataclass

from services.worker.engines import paged
from services.worker.engines.constraint import Constraint
from services.worker.engines.prefixes import Prefix
from shared.schemas import Sampling


@dataclass(slots=True)
class Running:
    prompt: int  # number of prompt tokens
    tokens: list[int]  # prompt and output
    ends: frozenset[int]  # tokens that end its output
    place: paged.Place
    sampling: Sampling
    seed: int
    constraint: Constraint | None  # None: free text
    prefix: Prefix
    computed: int = 0
