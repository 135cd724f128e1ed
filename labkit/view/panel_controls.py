"""Makes the panel's sliders and lists, and reads from them a strategy's name and launch parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from labkit.arguments import Parameters, Value
from labkit.write import Option

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
