"""Decides which entries of a plan draft, and which of their trees the target model verifies."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from services.worker.engines.torch.draft_model import Ask, DraftModel
from services.worker.engines.torch.running import Running
from services.worker.engines.torch.token_tree import Tree, trees_of
from shared.columns import unpack_list
from shared.core.worker.step import Work
from shared.errors import ConfigError
from shared.policy.speculation import along, select
from shared.schemas import Selection
from shared.text.tokenizer import Tokenizer


def trees_to_verify(
    draft: DraftModel,
    work: Sequence[Work],
    states: Sequence[Running],
    selection: Selection,
    beginning: Collection[int],
) -> dict[int, Tree]:
    """The trees to verify: of decodes that speculate; `beginning` were planned as prefills."""
    depth, width = unpack_list(selection.depth), unpack_list(selection.width)
    speculating = [
        n
        for n, state in enumerate(states)
        if depth[n] > 0
        and n not in beginning
        and work[n].tokens > 1
        and len(state.tokens) > state.prompt
        and len(state.tokens) == state.computed + 1
    ]
    if not speculating:
        return {}
    asks = [
        Ask(
            work[n].slot,
            states[n].tokens,
            depth[n],
            max(1, width[n]),
            states[n].sampling.temperature,
            states[n].prefix.salt,
        )
        for n in speculating
    ]
    drafted = draft.draft(asks)
    caps = np.array([work[n].tokens for n in speculating], dtype=np.int32)
    needed = np.array([work[n].needed for n in speculating], dtype=np.float32)
    theirs = selection if len(speculating) == len(work) else along(selection, speculating)
    chosen = select(theirs, caps, needed, drafted.candidates)
    roots = [states[n].tokens[-1] for n in speculating]
    return dict(zip(speculating, trees_of(roots, drafted, chosen), strict=True))


def check_tokenizers(tokenizer: Tokenizer, target: Path, draft: Path) -> None:
    """Raises ConfigError unless both models mean the same by every token."""
    of_target = tokenizer.inner.get_vocab(with_added_tokens=True)
    of_draft = Tokenizer.load(draft).inner.get_vocab(with_added_tokens=True)
    differing = of_target.items() ^ of_draft.items()
    if differing:
        token = min(differing, key=lambda pair: (pair[1], pair[0]))[0]
        raise ConfigError(
            f"the draft model in {draft} has another tokenizer than the model in {target}: "
            f"{len(of_draft)} and {len(of_target)} tokens, and they differ in {token!r}"
        )
