"""Measures, when an engine starts, the cost of its drafts (a small model's guesses at tokens)."""

from services.worker.engine import Engine, Outcome
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.perf.draft import DRAFT, DraftCost
from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot

LEAST = 0.001  # a fraction of 0 would mean that there is no draft
DECODES, PROMPT_TOKENS = 8, 48  # at most
DEPTH = 3
PROMPTS, ROUNDS = 4, 4  # of each slot; of each prompt, at most


def measure_draft(engine: Engine, depth: int = DEPTH) -> DraftCost:
    """The cost of drafts as fractions (step, read) of the target's: of a draft step for a few
    decodes, and of a prompt token that the draft reads. The engine holds nothing, before and after.
    It makes `depth` drafts at most, fewer in short contexts. The fastest counts, as a busy machine
    makes some slow. DRAFT where no request can have a prompt and a round.
    """
    facts, depth = engine.facts, min(depth, DEPTH)
    context = min(facts.context_tokens, facts.draft_context_tokens or facts.context_tokens)
    grows = depth + 2  # tokens that a round makes at most: one, then a chain and one
    rounds = min(ROUNDS, context // 2 // grows - 1)
    if rounds < 1:
        return DRAFT
    prompt_tokens = min(PROMPT_TOKENS, context - (rounds + 1) * grows)
    needed = -(-(prompt_tokens + (rounds + 1) * grows) // facts.block_tokens)
    blocks = min(facts.kv_blocks, facts.draft_kv_blocks or facts.kv_blocks)
    slots = [Slot(n) for n in range(min(DECODES, facts.max_slots, blocks // needed))]
    if not slots:  # the KV holds no request of this length
        return DRAFT
    plain_s, whole_s, step_s, read_s = list[float](), list[float](), list[float](), list[float]()

    def run(tokens: int, drafts: int = 0) -> Outcome:
        column = pack([drafts] * len(slots))
        selection = Selection(
            method="chain", depth=column, width=pack([1] * len(slots)), budget_tokens=1 << 20
        )
        work = [Work(slot, tokens, True) for slot in slots]
        return engine.execute(work, selection if drafts else None)

    for seed in range(PROMPTS):
        for slot in slots:
            prompt = [  # a new one each time, so that no prefix cache has it
                7 + (slot + n * (seed + 3)) % (facts.vocabulary - 7) for n in range(prompt_tokens)
            ]
            engine.load(Load(slot, prompt, 0, Sampling(temperature=0.0), seed))
        whole_s.append(run(prompt_tokens).exec_s)
        read_s.append(run(depth + 1, depth).drafted_s)
        for _ in range(rounds):
            plain_s.append(run(1).exec_s)
            step_s.append(run(depth + 1, depth).drafted_s / depth)
        for slot in slots:
            engine.release(slot)
    step = min(step_s) / min(plain_s)
    # the first drafts read the prompt as well: that is their time beyond so many steps
    read = (min(read_s) - depth * min(step_s)) / max(min(whole_s) - min(plain_s), 1e-9)
    return min(max(step, LEAST), 1.0), min(max(read, LEAST), 1.0)
