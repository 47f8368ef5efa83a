"""The choice of the new requests that SLOs-Serve accepts, by the rule of Moore and Hodgson: a cheap
stand-in for its dynamic programme (programme.py). The paper does not have it.

Requests are taken in the order of prefill deadlines. Where one breaks a condition, a new request
taken before is dropped: the one that asks for the most per value, counted in memory where memory is
short, else in the tokens of its prompt and of its decode until then.

Measured on 300 problems each as tests/shared/policy/slos_serve/test_programme.py draws them (10
new, 5 forced; 1 or 2 tiers): with equal values it serves as many as the programme in all of them
where memory is ample, and in 97 to 98 % where it is short. With values from 0.5 to 10 it does worse
in 9 to 13 %, and gets 93 to 98 % of the value. It takes a third of the programme's time (0.2 to 0.4
ms against 0.6 to 1.0), so the programme decides wherever its table is sure to stay small.
"""

import numpy as np

from shared.policy.seam import Bools, Floats
from shared.policy.slos_serve.programme import Problem, Walk


def choose_greedily(problem: Problem, tpot_s: tuple[float, ...]) -> Bools:
    """[items] the requests served, all forced ones among them. `tpot_s` runs along the tiers."""
    served, walk = list[int](), Walk(problem)
    for i in range(len(problem.new)):
        served.append(i)
        kept = walk.serve(i)
        while not (kept and walk.memory_fits and walk.decodes_fit):
            victims = [item for item in served if problem.new[item]]
            if not victims:
                break
            asked = (
                _tokens(problem, tpot_s, walk.at_s, victims)
                if walk.memory_fits
                else problem.blocks[victims]
            )
            served.remove(victims[int(np.argmax(asked / np.maximum(problem.value[victims], 1e-9)))])
            walk = Walk(problem)
            kept = walk.serve_all(served)
    chosen = np.zeros(len(problem.new), dtype=np.bool_)
    chosen[served] = True
    return chosen


def _tokens(problem: Problem, tpot_s: tuple[float, ...], now_s: float, items: list[int]) -> Floats:
    tier = problem.tier[items]
    decoded: Floats = (now_s - problem.due_s[items]) / np.array(tpot_s)[tier]
    return problem.prefill_tokens[items] + decoded
