"""The match between a subject and a subscription, with NATS' wildcards, for the check of
permissions and the simulated bus of the tests.
"""


def matches(pattern: list[str], tokens: list[str]) -> bool:
    """True if the tokens of a subscription match those of a subject."""
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
        tokens = tokens[: len(pattern)]
    if len(pattern) != len(tokens):
        return False
    for wanted, token in zip(pattern, tokens, strict=True):  # a generator costs twice as much
        if wanted != token and wanted != "*":
            return False
    return True
