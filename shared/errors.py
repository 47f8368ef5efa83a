"""The errors that our code raises, by whose fault it is.

SlacklineError
  + PeerError        a peer or a client sent something impossible: answer, count, drop it
      + StoreDamaged   a stored value is damaged, or is not there and must be
      + Unsendable     a message holds what no message can carry, such as an integer over 64 bits
      + TooManyTokens  a text has more tokens than its reader takes (shared/text/tokenizer.py)
  + BusError
      + NoResponders   nobody serves that subject now
      + BusTimeout     no answer in time; the effect is unknown
      + WrongSequence  an append or a compare-and-set lost its race
      + StoreFull      a bucket or a log has no room; nothing was written
  + ConfigError      the operator must change something; the message says what
  + EngineError      the engine of a worker is gone, and its KV with it: the worker must start anew
"""

import msgspec

# The errors that a decoder of msgspec raises for bytes that it does not take: ValueError for a text
# that is not UTF-8, RecursionError for values nested deeper than the interpreter allows.
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class SlacklineError(Exception):
    """The root of every error that we raise on purpose."""


class PeerError(SlacklineError):
    """A peer sent something impossible: drop it, say why. `code`: OpenAI's; `param`: the field."""

    def __init__(
        self, message: str, *, code: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class StoreDamaged(PeerError):
    """A stored value is damaged, or is not there and must be; for clients a `server_error`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="server_error")


class Unsendable(PeerError):
    """A message holds what no message can carry."""


class BusError(SlacklineError):
    """The bus could not do what was asked."""


class NoResponders(BusError):
    """Nobody serves the subject; raised at once."""


class BusTimeout(BusError):
    """No answer in time: the request may or may not have taken effect."""


class WrongSequence(BusError):
    """Another writer came first; `last_seq` is the sequence now, None where unknown."""

    def __init__(self, message: str, last_seq: int | None = None) -> None:
        super().__init__(message)
        self.last_seq = last_seq


class StoreFull(BusError):
    """The bucket or the log has no room for this write; nothing was written."""


class ConfigError(SlacklineError):
    """The operator must change something; the message says what."""


class EngineError(SlacklineError):
    """The engine of this worker is gone; the text says how. `in_turn`: it was computing then."""

    def __init__(self, message: str, *, in_turn: bool = False) -> None:
        super().__init__(message)
        self.in_turn = in_turn
