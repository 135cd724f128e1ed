"""Says what every rank did during a profiled step: phases, collectives and waiting, on one clock."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from labkit.charts import Lanes, as_image, drawn
from labkit.errors import LabError
from labkit.record import RunFolder
from labkit.spans import COMMUNICATION, COMPUTE, WAITING, Span, bubble, intersection, read_spans, total, union
from labkit.text import plain
from labkit.view.tables import aligned

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


class Timeline:
    """The profiled steps of a run; displays itself. `spans` are what the ranks did, in seconds since the first step
    started."""

    def __init__(self, folder: RunFolder):
        """Raises LabError if no rank of the run has written a profile."""
        self.id = folder.id
        self.name = folder.read_manifest().name
        ranks = range(folder.read_manifest().world_size)
        newest = folder.latest
        traces = {rank: path for rank in ranks if (path := newest.profile(rank)).is_file()}
        try:
            self.spans = read_spans(traces)
        except (OSError, ValueError) as error:
            raise LabError(plain(f"the profile in {newest.profile(0).parent} cannot be read: {error}")) from None
        if not self.spans:
            raise LabError(
                f"{plain(self.id)} has no profile. run.profile() records three steps of a running training, and "
                "launch(…, profile=True) those from the sixth or seventh on; a shorter run has none"
            )
        self.ranks = sorted({span.rank for span in self.spans})
        self.steps = sorted({span.step for span in self.spans})

    @property
    def step(self) -> int:
        """The step drawn by default: the last one, when the profiler has warmed up."""
        return self.steps[-1]

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per rank, over all recorded steps: seconds per step in each phase, waiting and in communication.
        `hidden` is the fraction of communication that overlapped with computation."""
        import pandas as pd

        return pd.DataFrame([self._row(rank) for rank in self.ranks]).set_index("rank")

    def _row(self, rank: int) -> dict[str, float]:
        spans = [span for span in self.spans if span.rank == rank]
        kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            kinds["communication" if span.kind in COMMUNICATION else span.kind].append((span.start, span.end))
        seconds = {kind: total(union(kinds[kind])) / len(self.steps) for kind in (*COMPUTE, WAITING, "communication")}
        computing = union([interval for kind in COMPUTE for interval in kinds[kind]])
        sent = union(kinds["communication"])
        hidden = total(intersection(sent, computing)) / total(sent) if sent else float("nan")
        length = (max(s.end for s in spans) - min(s.start for s in spans)) / len(self.steps)
        return {"rank": rank, "step_seconds": length, **seconds, "hidden": hidden}

    @property
    def bubble(self) -> float | None:
        """The fraction of time in which a pipeline's ranks are between chunks, from the first chunk of a step to the
        last; None without a pipeline. Waits within a chunk, as for tensor-parallel ranks, do not count. It is defined
        like Megatron-LM's (2104.04473, section 2.2.1), but relative to the total time: ideally (p-1)/(m+p-1)."""
        return bubble(self.spans)

    def of_step(self, step: int | None = None) -> list[Span]:
        """The spans of a step, in seconds since the first rank started it. Raises LabError if it was not recorded."""
        step = self.step if step is None else step
        if step not in self.steps:
            raise LabError(f"step {step!r} was not recorded; recorded steps: {', '.join(map(str, self.steps))}")
        spans = [span for span in self.spans if span.step == step]
        start = min((span.start for span in spans), default=0.0)
        return [span._replace(start=span.start - start, end=span.end - start) for span in spans]

    def lanes(self, step: int | None = None) -> Lanes:
        """Every rank's phases, with its collectives below. `step` is one of `.steps`, the last by default."""
        return Lanes(self.of_step(step), {rank: f"rank {rank}" for rank in self.ranks}, self._title(step))

    def figure(self, step: int | None = None) -> Figure:
        """The `lanes` as a plotly figure."""
        from labkit.charts import figure

        return figure(self.lanes(step))

    def animation(self, step: int | None = None) -> Figure:
        """The same step with a Play button: what each rank does and which ranks communicate at each moment."""
        from labkit.charts import animation

        return animation(self.lanes(step))

    def _title(self, step: int | None = None) -> str:
        """The title, with fractions as means over all recorded steps, but a pipeline's bubble in the drawn step."""
        rows = [self._row(rank) for rank in self.ranks]
        seconds = sum(row["step_seconds"] for row in rows)
        computing, waiting = (sum(row[kind] for row in rows for kind in kinds) for kinds in (COMPUTE, (WAITING,)))
        hidden = [row["hidden"] for row in rows if not math.isnan(row["hidden"])]
        parts = [f"{computing / seconds:.0%} of a step is compute", f"{waiting / seconds:.0%} waiting"]
        idle = bubble(self.of_step(step))
        if idle is not None:
            parts = [f"bubble {idle:.0%}"]
        elif hidden:
            parts.append(f"{sum(hidden) / len(hidden):.0%} of communication is hidden")
        return f"{plain(self.name)} on {len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''}: " + ", ".join(parts)

    def __repr__(self) -> str:
        values = [self._row(rank) for rank in self.ranks]
        shown = [name for name in values[0] if name != "rank" and any(v[name] and v[name] == v[name] for v in values)]
        rows = [
            {"rank": str(rank)} | {n: f"{v[n]:.0%}" if n == "hidden" else f"{v[n] * 1e3:.1f} ms" for n in shown}
            for rank, v in zip(self.ranks, values, strict=True)
        ]
        return f"{self._title()}\n{aligned(rows)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """A plotly figure for JupyterLab; an image for front ends without plotly."""
        bundle = {"text/html": as_image(drawn(self.lanes())), "text/plain": repr(self)}
        with suppress(ImportError):
            bundle |= self.figure()._repr_mimebundle_()
        return bundle
