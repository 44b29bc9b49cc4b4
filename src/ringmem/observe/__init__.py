"""Floor 6: seeing what memory does. Traces and the timelines drawn from them."""

from ringmem.observe.timeline import Timeline, format_nbytes
from ringmem.observe.trace import Trace

__all__ = ["Timeline", "Trace", "format_nbytes"]
