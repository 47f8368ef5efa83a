"""The kinds of message that cross the bus or lie in the store."""

from typing import Any

from shared import schemas

# what is decoded as a whole; the other structs are parts of these
KINDS: list[Any] = [
    schemas.GenerateRequest, schemas.Received, schemas.Refused, schemas.Attach, schemas.Replay,
    schemas.Explain, schemas.Explanation,
    schemas.StreamEvent, schemas.Body, schemas.Resume, schemas.Record,
    schemas.TaskSoFar, schemas.Offer,
    schemas.OfferAnswer, schemas.Digest, schemas.Announce, schemas.Hold, schemas.HoldAnswer,
    schemas.BatchPlan, schemas.PlanRefused, schemas.AttemptOver, schemas.LogEntry, schemas.Resync,
    schemas.ResyncPage, schemas.Settled, schemas.Withdraw, schemas.Withdrawn, schemas.Holdings,
    schemas.HoldingsAnswer, schemas.Cancel, schemas.Hint, schemas.TimeAsked, schemas.TimeTold,
    schemas.Present, schemas.PoolDigest, schemas.LeaseValue, schemas.Ended, schemas.Roster,
    schemas.RosterAnswer, schemas.WorkArrived, schemas.ReplicasNeeded, schemas.FindEnded,
    schemas.FoundEnded, schemas.AskPrefixes, schemas.Prefixes,
    schemas.Fetch, schemas.Tokenize | schemas.Detokenize, schemas.Tokenized, schemas.Detokenized,
]  # fmt: skip
