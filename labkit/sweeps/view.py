"""Shows a sweep as one table and one overlay of losses: HTML, plain text, and the static bundle of a saved notebook."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from labkit import words
from labkit.charts import Chart, Palette, as_image, drawn, spark_svg
from labkit.frontend import LiveView
from labkit.sweeps.folder import SweepFolder, SweepState
from labkit.sweeps.results import Result, Results, best_of, counted
from labkit.text import escaped, first_line, framed, pill, plain
from labkit.view import aligned, grid

MOST_ROWS = 40


def headline(results: Sequence[Result], seen: Results) -> str:
    """`3 of 6 points succeeded, 1 failed, 2 running · best loss 0.31 at point 2 (lr=0.001)`"""
    text = counted([result.state for result in results])
    best = best_of(list(results), seen.lowest)
    if best is None:
        return text
    return f"{text} · best {seen.metric} {words.quantity(best.best, 4)} at point {best.point} ({named(best, seen)})"


def named(result: Result, seen: Results) -> str:
    """`lr=0.001, seed=0`: the parameters that differ between points."""
    parameters = {name: value for name in seen.varied if (value := result.parameters.get(name)) is not None}
    return ", ".join(f"{name}={words.parameter_text(value)}" for name, value in parameters.items())


def sweep_html(title: str, state: SweepState, results: Sequence[Result], seen: Results) -> str:
    """Headline, overlay of the losses, and a table with a row for each point; all text is escaped here."""
    tint = Palette.STATES.get(state.state, Palette.GREY)
    mark = pill(f"{Palette.MARKS.get(state.state, '?')} {state.state}", tint)
    shown = _shown(results, seen)
    lines = {result.point: i for i, result in enumerate(_overlaid(shown, seen))}
    pictures = [spark_svg(_losses(result), lines.get(result.point)) for result in shown]
    why = state.sentence if _says_why(state, results) else ""
    more = f"{len(results) - len(shown)} more points: sweep.table()" if len(results) > len(shown) else ""
    reasons = "".join(f"<div>{escaped(each)}</div>" for each in _reasons(shown))
    table = grid(_rows(shown, results, seen), pictures=("loss by step", pictures))
    return framed(
        f"<div>{mark} <b>{escaped(title)}</b> · {words.seconds(state.seconds)}</div>"
        f"<div>{escaped(headline(results, seen))}</div>{_faint(why)}"
        f"{_overlay(shown, lines, seen)}{table}{_faint(more)}{reasons}"
    )


def sweep_text(title: str, state: SweepState, results: Sequence[Result], seen: Results) -> str:
    """The sweep as text for a terminal."""
    shown = _shown(results, seen)
    why = [state.sentence] if _says_why(state, results) else []
    lines = [
        f"{title}: {state.state} after {words.seconds(state.seconds)}",
        *why,
        headline(results, seen),
        aligned(_rows(shown, results, seen)),
    ]
    more = len(results) - len(shown)
    return plain("\n".join([*lines, *([f"  and {more} more"] if more else []), *_reasons(shown)]))


def sweep_bundle(title: str, state: SweepState, results: Sequence[Result], seen: Results) -> dict[str, str]:
    """The MIME bundle that replaces the live view: HTML with images, and plain text."""
    text = sweep_text(title, state, results, seen)
    return {"text/html": as_image(sweep_html(title, state, results, seen)), "text/plain": text}


def _shown(results: Sequence[Result], seen: Results) -> list[Result]:
    """At most MOST_ROWS results in the order of their points: those that run, then the best, then any."""
    sign = 1.0 if seen.lowest else -1.0

    def rank(result: Result) -> tuple[bool, bool, float]:
        return not result.is_active, result.best is None, sign * (result.best or 0.0)

    return sorted(sorted(results, key=rank)[:MOST_ROWS], key=lambda result: result.point)


def _overlaid(shown: Sequence[Result], seen: Results) -> list[Result]:
    """The points whose losses are drawn over one another: no more than lines can be told apart."""
    sign = 1.0 if seen.lowest else -1.0
    drawn = [result for result in shown if result.series is not None and result.series.points()]
    drawn.sort(key=lambda result: (result.best is None, sign * (result.best or 0.0)))
    return sorted(drawn[: Palette.MOST_LINES], key=lambda result: result.point)


def _overlay(shown: Sequence[Result], lines: dict[int, int], seen: Results) -> str:
    overlaid = [result for result in shown if result.point in lines]
    if not overlaid:
        return ""
    names = {lines[result.point]: f"point {result.point} ({named(result, seen)})" for result in overlaid}
    note = "" if len(overlaid) == len(seen.points) else f"of the best {len(overlaid)} points"
    charts = []
    for title, of in (("loss", [r.series for r in overlaid]), (seen.metric, [r.evaluated for r in overlaid])):
        series = {lines[r.point]: line for r, line in zip(overlaid, of, strict=True) if line and line.points()}
        if series:
            label = names.__getitem__
            charts.append(
                Chart(title, series, words.quantity, note=note, label=label, over="step", from_zero=False, log=None)
            )
    return drawn(charts)


def _losses(result: Result) -> list[float]:
    return [last for *_, last in result.series.points()] if result.series else []


def _rows(shown: Sequence[Result], results: Sequence[Result], seen: Results) -> list[dict[str, str]]:
    best = best_of(list(results), seen.lowest)
    return [_row(result, seen, is_best=result is best) for result in shown]


def _row(result: Result, seen: Results, is_best: bool) -> dict[str, str]:
    step = f"{result.step:,} of {result.steps:,}" if result.steps else f"{result.step:,}" if result.run else ""
    figures = {"loss": _value(result.loss, result)}
    if seen.metric != "loss":
        figures[seen.metric] = _value(result.last, result)
    return {
        "point": str(result.point),
        **{name: words.parameter_text(result.parameters.get(name, "")) for name in seen.varied},
        "state": result.state,
        **({"rung": str(result.rung)} if seen.manifest.rungs else {}),
        "step": step,
        **figures,
        f"best {seen.metric}": ("★ " if is_best else "") + _value(result.best, result),
        "duration": words.seconds(result.seconds) if result.run else "",
    }


def _value(value: float | None, result: Result) -> str:
    return words.quantity(value, 4) if result.run else ""


def _faint(text: str) -> str:
    return f'<div style="opacity:.75">{escaped(text)}</div>' if text else ""


def _says_why(state: SweepState, results: Sequence[Result]) -> bool:
    """Whether the state says more than the headline does."""
    return bool(state.sentence) and state.sentence != counted([result.state for result in results])


def _reasons(shown: Sequence[Result]) -> list[str]:
    """Why points failed or were stopped."""
    ended = [result for result in shown if result.why and not result.is_active]
    return [f"point {result.point} {result.state}: {first_line(result.why)}" for result in ended]


class SweepDashboard(LiveView):
    """Shows one sweep while it runs. It reads only folders."""

    period_seconds = 2.0

    def __init__(self, folder: SweepFolder, stop: Callable[[], Any], status: Callable[[], SweepState]):
        import ipywidgets as widgets

        super().__init__(folder.id)
        self.folder, self._status = folder, status
        self.hint = f"Show the sweep again with labkit.Sweep.attach({folder.id!r})"
        self._results = Results(folder)
        self._stop_button = widgets.Button(description="Stop all", icon="stop", tooltip="End every run of the sweep")
        self._stop_button.on_click(lambda _: self._on_stop(stop))
        self.box = widgets.VBox([self._html, widgets.HBox([self._stop_button])])

    def _draw(self) -> bool:
        state = self._status()  # read before the runs, so that a final state comes with the last results
        self._update(sweep_html(self.folder.id, state, self._results.poll(), self._results))
        return state.is_final

    def _bundle(self) -> dict[str, str]:
        results = Results(self.folder)
        return sweep_bundle(self.folder.id, self._status(), results.poll(), results)

    def _on_stop(self, stop: Callable[[], Any]) -> None:
        self._stop_button.disabled, self._stop_button.description = True, "Stopping…"
        threading.Thread(target=stop, name="labkit stop", daemon=True).start()
