"""What can be measured of a training step beside what always is; see README.md."""

from repro.train.monitors.config import MonitorConfig
from repro.train.monitors.measure import at_times, every_step, in_between, initial_memory
from repro.train.monitors.monitor import Monitor, Observation
from repro.train.monitors.registry import DEAR, GROUPS, MONITORS, group_of

__all__ = [
    "DEAR", "GROUPS", "MONITORS", "Monitor", "MonitorConfig", "Observation", "at_times", "every_step", "group_of",
    "in_between", "initial_memory",
]  # fmt: skip
