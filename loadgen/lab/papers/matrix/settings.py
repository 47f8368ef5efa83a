"""The policies of the matrix, and the settings that each may have there."""

from collections.abc import Mapping, Sequence

Settings = Mapping[str, str]

FIXED = ("fcfs", "edf", "sjf", "srpf")  # Sarathi's orders
CHUNKS = ("256", "512", "1024")  # theirs: all four get the one that suits EDF best at that load
CHUNK_ORDER = "edf"

# Of each paper's policy: what the paper prints, then what else its best setting may be. Where the
# first is not empty, the defaults are ours.
WITHOUT_DRAFT: Mapping[str, Sequence[Settings]] = {
    "slos_serve": ({}, {"long_deadlines": "work"}, {"sit_out": "true"}),
    "qoserve": (
        {},
        {"alpha_low_s": "0.008"},
        {"dynamic_chunking": "false", "chunk_tokens": "512"},
    ),
    "sola": ({}, {"max_batch_tokens": "1024"}),
    "adaserve": ({},),
    "ascendra": ({}, {"overload": "drop"}),
    "vllm": ({}, {"max_num_batched_tokens": "512"}),
}
WITH_DRAFT: Mapping[str, Sequence[Settings]] = {
    **WITHOUT_DRAFT,
    "slos_serve": (
        {"speculate": "paper"},
        {},
        {"speculate": "by_need"},
        {"sit_out": "true"},
    ),
    "adaserve": ({"depth_min": "4"}, {}),
    "vllm": ({}, {"max_num_batched_tokens": "512"}, {"spec_tokens": "4"}),
}
PAPERS = tuple(WITHOUT_DRAFT)


def settings_of(policy: str, *, drafts: bool) -> Sequence[Settings]:
    """The settings that a policy may have at a load, with or without a draft model."""
    return (WITH_DRAFT if drafts else WITHOUT_DRAFT)[policy]


def shown(settings: Settings) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in settings.items()) or "the defaults"
