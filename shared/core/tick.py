"""The event that every core gets from the loop that drives it (shared/process/drive.py)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """The instant that the core's `wake_at_unix_s` named has come, and nothing else has."""
