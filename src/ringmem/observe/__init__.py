"""Floor 6: seeing what memory does. Traces, their replay, and the timelines drawn from them."""

from ringmem.observe.replay import ReplayTimes, replay
from ringmem.observe.timeline import Timeline, format_nbytes
from ringmem.observe.trace import Trace

__all__ = ["ReplayTimes", "Timeline", "Trace", "format_nbytes", "replay"]
