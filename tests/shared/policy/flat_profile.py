"""A profile as flat as a CPU's: the more decodes share a pass, the cheaper is each."""

import json
from pathlib import Path

from shared.perf.profile_file import FOLDER


def flat_profile(folder: Path, *, batch_s: float, token_s: float) -> str:
    """The path of the profile, a file in `folder`. `batch_s`: the fixed part of a batch. `token_s`:
    each token of a prompt, each decode and each verified draft.
    """
    file = json.loads((FOLDER / "cpu-tiny.json").read_text())
    form = {
        "form": "piecewise_tokens_plus_attention",
        "tile": 1,
        "knots": [0],
        "slopes": [token_s],
        "c": batch_s,
        "attention": {"e": 2e-4, "p1": 8.6e-9, "p2": 7e-9, "d0": 0.0, "d1": 7.5e-5, "d2": 3e-7},
    }
    path = folder / "flat.json"
    path.write_text(json.dumps(file | {"name": "flat", "coefficients": form}))
    return str(path)
