"""Floor 5: memory with a tag that gives its physical pages back and has them again.

Examples
--------
>>> import ringmem
>>> from ringmem import residency
>>> with residency.tag("weights", device="cpu"):
...     weights = ringmem.zeros((256, 256), "float32", device="cpu")
>>> weights.fill(1.5)
>>> before = weights.ptr
>>> residency.sleep("weights")
>>> residency.wake("weights")
>>> weights.ptr == before, float(weights.to_numpy()[0, 0])
(True, 1.5)
>>> del weights
>>> residency.tag("weights", device="cpu").close()
"""

from __future__ import annotations

from ringmem.residency.registry import drop_backup, sleep, tag, tags, wake
from ringmem.residency.tagged import Progress, Tag

__all__ = ["Progress", "Tag", "drop_backup", "sleep", "tag", "tags", "wake"]
