"""The policy `slackline` with another value of one of its constants."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

WITHOUT = "without"  # a setting of the laboratory's runs alone: MODULE.CONSTANT=VALUE
MODULES = ("bounds", "prices", "give_way", "kv", "iteration", "drafts", "policy")


@contextmanager
def changed(constant: str) -> Iterator[None]:
    """`constant`: MODULE.CONSTANT=VALUE; "" for none."""
    if not constant:
        yield
        return
    named, _, value = constant.partition("=")
    of_name, _, name = named.partition(".")
    every = [importlib.import_module(f"shared.policy.slackline.{one}") for one in MODULES]
    before = getattr(every[MODULES.index(of_name)], name)
    # other modules have it by name, too
    holders = [module for module in every if getattr(module, name, None) is before]
    try:
        for module in holders:
            setattr(module, name, type(before)(float(value)))
        yield
    finally:
        for module in holders:
            setattr(module, name, before)
