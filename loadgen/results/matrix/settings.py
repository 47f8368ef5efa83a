"""The policies of the matrix, and the settings that each may have there."""

from collections.abc import Mapping, Sequence

Settings = Mapping[str, str]

FIXED = ("fcfs", "edf", "sjf", "srpf")  # Sarathi's orders
CHUNKS = ("256", "512", "1024")  # theirs: all four get the one that suits EDF best at that load
CHUNK_ORDER = "edf"

# Of each paper's policy: what the paper prints, and then what else its best setting may be. The
# first differs from the policy's defaults where those are ours.
PAPERS: Mapping[str, Sequence[Settings]] = {
    "slos_serve": ({"speculate": "paper"}, {}, {"speculate": "never"}),
    "qoserve": (
        {},
        {"alpha_low_s": "0.008"},
        {"dynamic_chunking": "false", "chunk_tokens": "512"},
    ),
    "sola": ({}, {"max_batch_tokens": "1024"}),
    "adaserve": ({}, {"depth_min": "1"}),
    "ascendra": ({}, {"overload": "drop"}),
    "vllm": ({}, {"max_num_batched_tokens": "512"}, {"spec_tokens": "4"}),
}


def printed(policy: str) -> Settings:
    return PAPERS[policy][0]


def shown(settings: Settings) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in settings.items()) or "the defaults"
