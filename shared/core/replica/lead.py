"""The lead: the next plan leaves so long before the predicted end of the iteration that runs. Late
enough to include the newest requests, early enough to be there in time.

On average a new request waits as long as the lead; the engine waits as long as a plan comes after
the end. Where iterations end as predicted, the lead covers only the message's way. Where not,
a lead that covers the worst of them makes every new request wait an iteration more, and the engine
rest only a little less. So the engine may wait for IDLE_SHARE of its time.
"""

IDLE_SHARE = 0.003
STEP_MAX = 0.1  # share of an iteration; a longer wait has other causes than the way


class Lead:
    """Grows by what the engine waited beyond its share, and shrinks while it waits less."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self.seconds, self._min_s, self._max_s = first_s, first_s, max_s

    def observe(self, idle_s: float, exec_s: float) -> None:
        """The engine waited `idle_s` for a plan of `exec_s` that was sent while another ran."""
        wanted_s = self.seconds + min(idle_s, STEP_MAX * exec_s) - IDLE_SHARE * exec_s
        self.seconds = min(max(wanted_s, self._min_s), self._max_s)
