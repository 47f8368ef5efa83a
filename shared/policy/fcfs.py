"""First come, first served (Sarathi-FCFS in QoServe section 4)."""

from shared.policy.chunk import Rows
from shared.policy.sarathi import Sarathi, Settings
from shared.policy.seam import Floats, View


def fcfs(settings: Settings) -> Sarathi:
    return Sarathi("fcfs", arrival, settings)


def arrival(view: View, queue: Rows) -> Floats:
    return view.arrived_unix_s[queue]
