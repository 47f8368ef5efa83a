"""How long before the predicted end of an iteration the next plan leaves: late enough to know who
came, early enough to be there.

A newcomer waits for the lead in the mean, the engine for what a plan is late beyond it. Where
iterations end as predicted the lead needs to cover only the way; where they do not, covering the
worst of them makes every newcomer wait an iteration more for an engine that rests a little less. So
the engine is allowed to wait for IDLE_SHARE of its time.
"""

IDLE_SHARE = 0.003
STEP_MAX = 0.1  # of an iteration: a plan that was held up for longer says nothing about the way


class Lead:
    def __init__(self, first_s: float, max_s: float) -> None:
        self.seconds, self._min_s, self._max_s = first_s, first_s, max_s

    def observe(self, idle_s: float, exec_s: float) -> None:
        """The engine waited `idle_s` for a plan of `exec_s` that was sent while another ran."""
        wanted_s = self.seconds + min(idle_s, STEP_MAX * exec_s) - IDLE_SHARE * exec_s
        self.seconds = min(max(wanted_s, self._min_s), self._max_s)
