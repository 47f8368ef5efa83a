"""Checks, once nothing moves, that planners know what the engines of their replicas keep."""

from collections.abc import Mapping

from services.planner.service import Planner
from services.worker.engines.sim.engine import SimEngine
from shared.prefix import CHAIN_TOKENS, chain_of, prefix_of, salt_of
from shared.schemas import GenerateRequest
from shared.subjects import DEFAULT_TENANT


def check_prefixes(
    planners: Mapping[str, Planner],
    engines: Mapping[str, SimEngine],
    requests: Mapping[str, GenerateRequest],
) -> int:
    """The tokens that are found of all prompts, on all replicas. Raises AssertionError where an
    engine would find another part of a prompt than its planner expects. What was fetched since its
    last iteration the engine has not told yet.
    """
    total = 0
    for planner in planners.values():
        for replica, seat in planner._planners.items():
            engine, cache = engines[replica], engines[replica]._cache
            if not seat.core.synced or cache is None:
                continue
            engine.check()
            for request in requests.values():
                chain = chain_of(request.token_ids or [], salt_of(DEFAULT_TENANT, ""))
                if not cache.changes.untold.isdisjoint(chain):
                    continue
                (found,) = seat.core.kept.found([(0, prefix_of(chain))])
                assert found.tokens == CHAIN_TOKENS * cache.match(chain), (
                    f"{request.request_id} at {replica}"
                )
                total += found.tokens
    return total
