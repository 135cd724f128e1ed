"""Shows runs: pure data goes in; text, SVG and HTML come out. Only the dashboard needs a kernel."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.view.charts.bands import MANY as MANY  # more lines than this are indistinguishable
    from labkit.view.charts.bands import Line as Line
    from labkit.view.charts.bars import CATEGORY_COLOURS as CATEGORY_COLOURS  # The same in all memory charts; red
    from labkit.view.charts.bars import LIMIT_COLOUR as LIMIT_COLOUR
    from labkit.view.charts.bars import Bar as Bar  # `held`
    from labkit.view.charts.bars import bars as bars  # Bars with the same name are grouped
    from labkit.view.charts.bars import key as key  # The legend, in the order in which a bar is stacked
    from labkit.view.charts.images import as_image as as_image  # The page with its SVG as `<img>`
    from labkit.view.charts.plan_figures import Point as Point  # A point of a curve with its band from `low` to `high`
    from labkit.view.charts.plan_figures import break_even as break_even  # Speed of two devices relative to one, over
    from labkit.view.charts.plan_figures import memory_planned as memory_planned  # Bytes per rank at the peak, stacked
    from labkit.view.charts.plan_figures import scaling_planned as scaling_planned  # Throughput over ranks, both
    from labkit.view.charts.run_figures import runs_together as runs_together  # The loss of several runs, aligned by
    from labkit.view.charts.spark import spark_svg as spark_svg  # In the style of a chart's `line`, or grey
    from labkit.view.charts.svg import COLOURS as COLOURS  # Mid-tones with contrast on white and on near-black; dashes
    from labkit.view.charts.svg import Chart as Chart  # `series` by rank, or by another number that `label` names
    from labkit.view.charts.svg import drawn_together as drawn_together  # One SVG with all charts in a grid
    from labkit.view.charts.timeline_figures import KIND_COLOURS as KIND_COLOURS
    from labkit.view.comparison import compare as compare  # Compare runs, or their ids or folders, in one table
    from labkit.view.frontend import BROKEN_KERNELS as BROKEN_KERNELS  # ipykernel releases in which a thread cannot
    from labkit.view.frontend import check_kernel as check_kernel  # Raise LabError for the two ipykernel releases in
    from labkit.view.frontend import execution_count as execution_count  # The number of the cell that is executed, if
    from labkit.view.frontend import is_headless as is_headless  # Whether no user can interact with this process later
    from labkit.view.frontend import notebook_shell as notebook_shell  # IPython's shell when it belongs to a notebook
    from labkit.view.frontend import ui as ui  # `svg`
    from labkit.view.live.dashboard import Dashboard as Dashboard  # Shows one live run
    from labkit.view.live.dashboard import close as close  # Close a widget and its parts
    from labkit.view.live.page import MARKS as MARKS
    from labkit.view.live.page import TINTS as TINTS
    from labkit.view.live.page import attempt_ended as attempt_ended  # `attempt 1 failed
    from labkit.view.live.page import run_text as run_text  # The same as plain text, for terminals, diffs and front
    from labkit.view.live.progress_line import read_progress_line as read_progress_line  # `(text, facts)` of a
    from labkit.view.live.run_charts import curves as curves  # By title
    from labkit.view.live.run_charts import show_step as show_step
    from labkit.view.live.tables import CELL as CELL  # Of tables that are sent once.
    from labkit.view.live.tables import HEAD as HEAD
    from labkit.view.live.tables import ROW as ROW
    from labkit.view.live.tables import TABLE as TABLE
    from labkit.view.live.tables import grid as grid  # A table of text with an SVG mark before each row
    from labkit.view.live.terminal import Screen as Screen  # The notebook's live view as text, drawn with rich
    from labkit.view.live.terminal import StatusLine as StatusLine  # One terminal line, rewritten in place
    from labkit.view.live.verdict import verdict as verdict  # At most `limit` sentences, the most urgent first
    from labkit.view.panel_controls import Controls as Controls  # `changed` is called after every change
    from labkit.view.panel_controls import panel_page as panel_page  # `verdict` is "fits", "does not fit",
    from labkit.view.plan_tables import aligned as aligned  # A text table
    from labkit.view.plan_tables import band as band  # `0.31 s (0.25 to 0.40 s)`
    from labkit.view.plan_tables import memory_rows as memory_rows  # One row per category and one for the total
    from labkit.view.plan_tables import percent_off as percent_off  # ` (+12.0%)`
    from labkit.view.plan_tables import plan_html as plan_html  # The same, with `drawn` as bars against a limit of
    from labkit.view.plan_tables import plan_text as plan_text  # `peaks` by source
    from labkit.view.plotly_pictures import register_pictures as register_pictures  # saves pictures of plotly figures
    from labkit.view.report import ReportPath as ReportPath  # A path that a notebook shows as a link
    from labkit.view.report import static_bundle as static_bundle  # The MIME bundle that replaces the live view
    from labkit.view.report import write_report as write_report  # Write one HTML file about the run that opens offline
    from labkit.view.run_list import RunList as RunList  # Runs, newest first, displayed as a table of the first 50
    from labkit.view.run_list import parameter_text as parameter_text  # At most 24 characters of a script's parameter
    from labkit.view.timeline import Timeline as Timeline  # The profiled steps of a run
else:
    __getattr__, __dir__ = face(__name__)
