"""Pipeline parallelism: each rank holds one or more stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from labkit.planner.model.facts import ModelFacts
from labkit.planner.strategies.staged import Staged, filling, micro_batches
from labkit.planner.strategies.strategy import Axes, Layout, Way


class Pipeline(Staged):
    name, simplicity = "pipeline", 7
    frees_later = "a pipeline"

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        return Axes(pipeline=ranks)

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        for count in dict.fromkeys((accumulate, filling(ranks, accumulate, samples))):
            for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
                more, words = micro_batches(count, accumulate)
                yield {"schedule": schedule} | more, (schedule, *words)

    def stretched(self, facts: ModelFacts, layout: Layout, ranks: int) -> Layout | None:
        longer = replace(layout, ranks=ranks, pipeline=ranks)
        fits = len(facts.blocks) % longer.stages == 0 and layout.accumulate >= ranks
        return longer if fits else None
