"""What several ranks make of a forward that writes, in the words of the checker and of plans."""

from __future__ import annotations

import re

WRITE_LOST = "forward writes to {names}, of which FSDP has gathered a copy that it drops"
WRITE_OF_RANK_0 = "forward writes to {names} what only this rank's samples say, and DDP keeps what rank 0 writes"
WRITE_APART = "forward writes to {names} what only this rank's samples say, so that replicas differ"
# Statistics of normalizations are for evaluation, and those of rank 0 are about as good as those of all ranks.
STATISTICS = re.compile(r"(^|[._])(running_\w+|num_batches_tracked)$")
