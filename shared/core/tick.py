"""The one event that every driven core knows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """The instant that the core's `wake_at_unix_s` named has come, and nothing else has."""
