"""Shows an interactive panel: move sliders to see each strategy's predicted memory and speed, then run it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from labkit import words
from labkit.arguments import Parameters, Value, checked
from labkit.charts import Bar, Bars, Palette, drawn
from labkit.errors import LabError
from labkit.frontend import check_kernel, close_widget, is_headless, ui
from labkit.launch_options import LaunchOptions
from labkit.launching import start_run
from labkit.planner import (
    DEVICES,
    THIS_MACHINE,
    Candidate,
    Device,
    ModelFacts,
    Plan,
    SpeedModel,
    Trial,
    device_named,
    devices_named,
    evaluate,
    facts_of,
    measure_speed,
    needed,
    outlook,
    strategy_named,
    variants,
)
from labkit.record import RunReader
from labkit.run import Run
from labkit.text import escaped, framed, pill, plain
from labkit.view import aligned, grid
from labkit.write import Option, Script, options_of_strategy

RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
POWERS = tuple(2**n for n in range(13))
PRECISIONS = ("fp32", "bf16", "fp16")
LABEL = {"description_width": "150px"}
WIDTH = "390px"
# Labels of options whose names alone do not say what they are
LABELS = {
    "accumulate": "micro-batches",
    "bucket_mib": "bucket size (MiB)",
    "compress": "gradient compression",
    "cpu_offload": "CPU offload",
    "four_bit": "4-bit weights",
    "outer_lr": "outer learning rate",
    "pipeline": "pipeline ranks",
    "powersgd_rank": "PowerSGD rank",
    "schedule_free": "schedule-free AdamW",
    "sync_every": "steps between syncs",
    "tensor": "tensor ranks",
    "virtual_stages": "stages per rank",
    "wrap": "units",
    "wrap_size": "smallest unit (parameters)",
}


class Controls:
    """`changed` is called after every change; `own` maps each strategy to its own options; `begin` holds the initial
    values."""

    def __init__(
        self,
        devices: Sequence[str],
        own: Mapping[str, Mapping[str, Option]],
        begin: Parameters,
        changed: Callable[[], None],
    ):
        import ipywidgets as widgets

        self._own, self._changed = own, changed
        self._begin = begin

        def steps(name: str, values: tuple[int, ...], at: int) -> Any:
            options = sorted({*values, at})
            return widgets.SelectionSlider(description=name, options=options, value=at, style=LABEL)

        def choice(name: str, options: Iterable[str], at: str) -> Any:
            return widgets.Dropdown(description=name, options=list(options), value=at, style=LABEL)

        def whole(name: str, default: int = 1) -> int:
            return int(str(begin.get(name, default)))

        recomputed = bool(begin.get("activation_checkpointing"))
        self.strategy = choice("strategy", own, str(begin["strategy"]))
        device = str(begin["device"])
        self.device = choice("device", dict.fromkeys((device, *devices)), device)
        self.ranks = steps("ranks", RANKS, whole("ranks"))
        self.shared = {
            "global_batch_size": steps("global batch", POWERS, whole("global_batch_size", 64)),
            "accumulate": steps(LABELS["accumulate"], POWERS[:8], whole("accumulate")),
            "precision": choice("precision", PRECISIONS, str(begin.get("precision", "fp32"))),
            "activation_checkpointing": widgets.Checkbox(
                description="activation checkpointing", value=recomputed, style=LABEL
            ),
        }
        self._made: dict[str, dict[str, Any]] = {}
        self._place = widgets.VBox()
        batch, accumulate, precision, checkpointing = self.shared.values()
        left = widgets.VBox([self.strategy, self.ranks, batch, accumulate, checkpointing])
        right = widgets.VBox([self.device, precision, self._place])
        for control in (self.strategy, self.ranks, self.device, *self.shared.values()):
            control.layout.width = WIDTH
            control.observe(self._moved, names="value")
        self.box = widgets.HBox([left, right])
        self.box.layout.flex_flow = "row wrap"
        self._show_own()

    @property
    def parameters(self) -> dict[str, Value]:
        """The values as parameters of labkit.launch."""
        own = self._made[self.strategy.value]
        return {name: control.value for name, control in (*self.shared.items(), *own.items())}

    def offer(self, own: Mapping[str, Mapping[str, Option]]) -> None:
        """Offer these strategies, each with its own options; the chosen one stays chosen."""
        chosen, self._own = self.strategy.value, own
        self.strategy.unobserve(self._moved, names="value")  # new options select the first one
        self.strategy.options = list(own)
        self.strategy.value = chosen
        self.strategy.observe(self._moved, names="value")

    def _moved(self, change: Mapping[str, Any]) -> None:
        if change["owner"] is self.strategy:
            self._show_own()
        self._changed()

    def _show_own(self) -> None:
        """Show the chosen strategy's own options. Values of the others are kept for when they are chosen again."""
        name = self.strategy.value
        if name not in self._made:
            self._made[name] = {
                key: _control(key, option, self._begin.get(key)) for key, option in self._own[name].items()
            }
            for control in self._made[name].values():
                control.layout.width = WIDTH
                control.observe(self._moved, names="value")
        self._place.children = list(self._made[name].values())


def _control(name: str, option: Option, initial: Any) -> Any:
    """A list for choices, a checkbox for a flag, a number field otherwise."""
    import ipywidgets as widgets

    value = option.default if initial is None else initial
    label = LABELS.get(name, name.replace("_", " "))
    common = {"description": label, "tooltip": f"{name}: {option.help}", "style": LABEL}
    if option.choices:
        at = value if value in option.choices else option.choices[0]
        return widgets.Dropdown(options=list(option.choices), value=at, **common)
    if option.kind == "flag":
        return widgets.Checkbox(value=bool(value), **common)
    if option.kind == "int":
        return widgets.BoundedIntText(value=int(value or 0), min=0, max=1 << 20, **common)
    return widgets.FloatText(value=float(value or 0.0), **common)


STEPS = 30
PERIOD_SECONDS = 0.5
TENSOR = [(2, False), (4, False), (8, False)]  # tensor ranks, and whether the sequence is split, too
MEASURES = "Measure computation and collectives on this machine for 20 seconds, for use in predictions"
TINTS = {"fits": Palette.GREEN, "does not fit": Palette.RED, "impossible": Palette.AMBER}
TINTS |= dict.fromkeys(("unknown", ""), Palette.GREY)
COUNTING = "calculating the model's memory without allocating it (a few seconds) …"


@checked()
def panel(
    script: Script | str = "fsdp", *, device: str | None = None, ranks: int | None = None, **parameters: Any
) -> Panel:
    """Sliders for strategy, ranks, batch, precision and device that update the prediction; Run measures the selected
    setting.

    `script` is a Script with your cells or the name of one of labkit's; a child process analyzes its model once.
    `device` is a preset ("T4", "2xT4"); None means this machine. `ranks` (default: one per device, or two) and
    `parameters` are the initial values. Raises LaunchError for an unknown device.
    """
    count, kind = devices_named(device)
    begins = THIS_MACHINE if kind.is_this_machine else kind.name
    return Panel(script if isinstance(script, Script) else Script.load(script), begins, ranks or count or 2, parameters)


class Panel:
    """Predictions for the setting, with measurements. Threads touch nothing but widget traits."""

    def __init__(self, script: Script, device: str, ranks: int, parameters: Mapping[str, Any]):
        self._script, self.scripts = script, variants(script, every=True)
        self._strategy = next(name for name, each in self.scripts.items() if each is script)
        self.candidates: list[Candidate] = []
        self.chosen: Candidate | None = None
        self.trials: list[Trial] = []
        self._parameters = dict(parameters)
        self._devices: dict[str, Device] = {}
        self._speed_models: dict[str, SpeedModel] = {}
        self._begin = {"strategy": self._strategy, "device": device, "ranks": ranks, **parameters}
        self._facts: ModelFacts | None = None
        self._problem = ""
        self._run: Run | None = None
        self._closed, self._counting = threading.Event(), threading.Lock()
        self._splits: list[tuple[int, bool]] = []
        self.box: Any = None

    def count(self, splits: Iterable[tuple[int, bool]] = TENSOR) -> None:
        """Count the model, whole and with layers split over tensor ranks; an error replaces the prediction."""
        with self._counting:
            try:
                self._splits = [*dict.fromkeys((*self._splits, *splits))]
                device = self._device(self._begin["device"])
                self._facts = facts_of(self._script, self._parameters, self._splits, capability=device.dispatches_as)
                self.scripts = variants(self._script, self._facts.divides, every=True)
            except LabError as error:
                self._problem = str(error)

    def page(self, strategy: str, ranks: int, device: str, parameters: Mapping[str, Any]) -> str:
        """The prediction for a setting as HTML; sets `candidates`, which it shows, and `chosen`, the selected one."""
        rows = [trial.row() for trial in self.trials]
        if self._facts is None:
            return panel_page("impossible" if self._problem else "", self._problem or COUNTING, Bars(()), rows)
        on = self._device(device)
        values = {name: value for name, value in self._parameters.items() if name not in parameters}
        values |= needed(self.scripts[strategy], parameters)
        shown = {name: s for name, s in self.scripts.items() if name == strategy or strategy_named(name).is_usual}
        self.candidates = outlook(shown, strategy, self._facts, on, ranks, values, self._speed_model(on))
        limit_name = f"a rank's share of {on.name}" if on.shared else on.name
        self.chosen = next(candidate for candidate in self.candidates if candidate.strategy == strategy)
        drawn = self._bars(self.chosen)
        verdict, sentence = ("", COUNTING) if self._is_being_counted(self.chosen) else self.chosen.verdict(on)
        if not strategy_named(strategy).trains_alike:
            sentence += f". {strategy} does not train the same model as a single rank would"
        return panel_page(verdict, sentence, Bars(drawn, on.usable_by(ranks) or None, limit_name), rows)

    def _bars(self, chosen: Candidate) -> list[Bar]:
        """Each candidate's, followed by those of its runs. What keeps several from being planned is stated once, and
        of the chosen one above the bars."""
        drawn: list[Bar] = []
        first = {chosen.remark: chosen.strategy}
        for candidate in self.candidates:
            bar, like = (
                candidate.bar(chosen=candidate is chosen),
                first.setdefault(candidate.remark, candidate.strategy),
            )
            if bar.held is None and (candidate is chosen or like != candidate.strategy):
                bar = bar._replace(note="see above" if candidate is chosen else f"as {like}")
            drawn += [bar, *(trial.bar() for trial in self.trials if trial.planned.is_like(candidate))]
        return drawn

    def _device(self, name: str) -> Device:
        if name not in self._devices:
            self._devices[name] = device_named(name)
        return self._devices[name]

    def _speed_model(self, device: Device) -> SpeedModel | None:
        if device.name not in self._speed_models and self._facts:
            self._speed_models[device.name] = SpeedModel(
                self._script, self._facts, device, self._begin["ranks"], self._parameters
            )
        return self._speed_models.get(device.name)

    def _build(self) -> None:
        import ipywidgets as widgets

        names = [THIS_MACHINE, *(device.name for device in DEVICES)]
        self._controls = Controls(names, self._own_options(), self._begin, self._draw)
        self._html, self._message = widgets.HTML(), widgets.HTML()
        self._go = widgets.Button(description="Run", icon="play", tooltip="Launch this setting on this machine")
        self._go.layout.width = "auto"  # its description changes
        self._halt = widgets.Button(description="Stop", icon="stop", tooltip="End the run on every rank", disabled=True)
        self._steps = widgets.BoundedIntText(description="steps", value=STEPS, min=1, max=1 << 20)
        self._steps.layout.width = "150px"
        self._steps.style.description_width = "40px"
        self._go.on_click(lambda _: self._in_thread(self._measure, "run"))
        self._halt.on_click(lambda _: self._in_thread(self._stop, "stop"))
        self._speed = widgets.Button(description="Measure speed", icon="tachometer", tooltip=MEASURES)
        self._speed.on_click(lambda _: self._in_thread(self._measure_speed, "speed"))
        buttons = widgets.HBox([self._go, self._halt, self._steps, self._speed, self._message])
        buttons.layout.flex_flow = "row wrap"
        self.box = widgets.VBox([self._controls.box, self._html, buttons])

    def _own_options(self) -> dict[str, Mapping[str, Option]]:
        return {name: options_of_strategy(script) for name, script in self.scripts.items()}

    def _draw(self) -> None:
        controls = self._controls
        if controls.strategy.options != tuple(self.scripts):  # some are known only once the model is counted
            controls.offer(self._own_options())
        self._html.value = self.page(
            controls.strategy.value, controls.ranks.value, controls.device.value, controls.parameters
        )
        self._count_what_is_missing()
        here = self._here(self.chosen) if self.chosen else None
        self._go.disabled = self._run is not None or here is None or not (here.fits or here.is_unknown)
        elsewhere = self._controls.device.value != THIS_MACHINE
        self._go.description = "Run on this machine" if elsewhere else "Run"

    def _here(self, candidate: Candidate) -> Candidate:
        """The candidate on this machine, where it is launched, whichever device is selected."""
        here = self._device(THIS_MACHINE)
        return evaluate(candidate, self._facts, here, self._speed_model(here)) if self._facts else candidate

    def _in_thread(self, work: Any, name: str) -> None:
        """Run `work` in a thread and display its errors."""

        def watched() -> None:
            try:
                work()
            except LabError as error:
                self._message.value = escaped(plain(str(error)))
            except Exception as error:
                self._message.value = f"<pre>the panel failed: {escaped(repr(error))}</pre>"

        threading.Thread(target=watched, name=f"labkit panel {name}", daemon=True).start()

    def _open(self) -> None:
        """Count and draw, first without split layers, which take as long again."""
        for splits in ([], TENSOR):
            self.count(splits)
            self._draw()

    def _missing_split(self, candidate: Candidate) -> tuple[int, bool] | None:
        """How the candidate splits layers, if that is not counted: sequence parallel, or over another number of
        ranks."""
        layout, facts = candidate.layout, self._facts
        if layout is None or facts is None or layout.tensor == 1:
            return None
        is_known = layout.variant in facts.profiles or layout.tensor in facts.unsplit
        return None if is_known else (layout.tensor, bool(layout.options.get("sequence_parallel")))

    def _is_being_counted(self, candidate: Candidate) -> bool:
        split = self._missing_split(candidate)
        return self.box is not None and split is not None and (self._counting.locked() or split not in self._splits)

    def _count_what_is_missing(self) -> None:
        """Count layers split as in the setting, unless that has been tried or something else is being counted."""
        split = self._missing_split(self.chosen) if self.chosen else None
        if split and split not in self._splits and not self._counting.locked():
            self._in_thread(lambda: self._count_and_draw(split), "count")

    def _count_and_draw(self, split: tuple[int, bool]) -> None:
        self.count([split])
        self._draw()

    def _measure_speed(self) -> None:
        self._speed.disabled, self._message.value = True, "measuring computation and communication on this machine …"
        ranks = self._controls.ranks.value
        try:
            measure_speed(self._script, ranks, self._parameters | self._controls.parameters)
            self._message.value = f"measured on {ranks} ranks; stored for this machine"
        except LabError as error:
            self._message.value = escaped(plain(str(error)))
        self._begin["ranks"] = ranks
        self._speed_models.clear()
        self._speed.disabled = False
        self._draw()

    def _stop(self) -> None:
        self._halt.disabled = True
        if self._run:
            self._run._stop_from_button(False)

    def _measure(self) -> None:
        """Launch the setting, display its progress, and add its measurements to the prediction."""
        if self.chosen is None or self._facts is None or self._run:
            return
        here, planned = self._device(THIS_MACHINE), self._here(self.chosen)
        self._go.disabled = True
        parameters = {**planned.parameters, "steps": self._steps.value}
        try:
            self._run = run = start_run(
                planned.script,
                LaunchOptions(nproc_per_node=planned.ranks, name=planned.strategy, trace_memory=True),
                parameters,
                tied=True,
                prediction=self._recorded(planned, here),
            )
        except LabError as error:
            self._message.value = f"<span>{escaped(plain(str(error)))}</span>"
            self._go.disabled = False
            return
        self._halt.disabled = False
        reader = RunReader(run.folder)
        while not (state := run.status()).is_final and not self._closed.wait(PERIOD_SECONDS):
            reader.poll()
            self._message.value = escaped(words.headline(reader, state))
        cause = state.cause.sentence if state.cause else ""
        self._message.value = escaped(plain(f"{run.id}: {state.state}{f': {cause}' if cause else ''}"))
        if state.state == "succeeded":
            self.trials.append(Trial.read(planned, run.folder))
        self._run, self._halt.disabled = None, True
        self._draw()

    def _recorded(self, planned: Candidate, here: Device) -> dict[str, Any]:
        """The prediction as recorded in the run's folder before its first step."""
        assert planned.layout
        plan = Plan(
            script=planned.script,
            path="",
            ranks=planned.ranks,
            parameters=planned.parameters,
            device=here,
            layout=planned.layout,
            rank=planned.rank,
            facts=self._facts,
            peak=planned.peak,
            states=None,
            advice=None,
            problems=(),
        )
        step = planned.step
        speed = {"step_seconds": [step.seconds, step.low, step.high], "assumed": list(step.assumed)} if step else {}
        return plan.record() | speed

    def close_widget(self) -> None:
        """Close the widgets. A current run continues; stop it with labkit.attach("latest").stop()."""
        self._closed.set()
        if self.box is not None:
            close_widget(self.box)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if ui() != "svg" or is_headless():
            return self._show_still()
        check_kernel(version("ipykernel"))
        if self.box is None:
            self._build()
            self._draw()
            self._in_thread(self._open, "count")
        bundle = dict(self.box._repr_mimebundle_())
        hint = "This panel is no longer live. Run this cell to open it again"  # for readers of the saved file
        display(bundle | {"text/html": hint, "text/plain": hint}, raw=True)
        return None

    def _show_still(self) -> None:
        """Display the prediction for the initial values once, without widgets."""
        from IPython.display import display

        self.count()
        page = self.page(self._strategy, self._begin["ranks"], self._begin["device"], {})
        text = aligned([candidate.row() for candidate in self.candidates]) or self._problem
        if ui() == "text":
            print(plain(text))
        else:
            display({"text/html": page, "text/plain": plain(text)}, raw=True)


def panel_page(
    verdict: str,
    sentence: str,
    bars: Bars,
    runs: Sequence[Mapping[str, str]],
) -> str:
    """The HTML. `verdict` is as of `Candidate.verdict`, or "" while the model is counted; `runs` are rows of texts."""
    mark = f"{pill(verdict, TINTS[verdict])} " if verdict else ""
    head = f'<div style="min-height:3em">{mark}{escaped(sentence)}</div>'
    return framed(f"{head}{drawn(bars)}{grid(runs)}")
