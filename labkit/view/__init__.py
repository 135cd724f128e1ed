"""Shows runs: pure data goes in; text, SVG and HTML come out. Only the dashboard needs a kernel."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.view.comparison import compare as compare  # shows runs side by side
    from labkit.view.comparison import runs_together as runs_together  # the losses of several runs as one figure
    from labkit.view.live.dashboard import Dashboard as Dashboard  # the live view of a run in a notebook
    from labkit.view.live.disturbances import disturbances as disturbances  # what else the machine did during a run
    from labkit.view.live.offers import in_log as in_log  # offers to chart what a script only prints
    from labkit.view.live.page import run_text as run_text  # a run as plain text
    from labkit.view.live.run_charts import curves as curves  # the loss and the evaluated metrics over steps
    from labkit.view.live.slowdowns import slowdowns as slowdowns  # what takes a rank longer than before
    from labkit.view.live.terminal import Screen as Screen  # the live view of a run in a terminal
    from labkit.view.live.terminal import StatusLine as StatusLine  # a terminal line that is rewritten in place
    from labkit.view.live.verdict import leak as leak  # says which memory keeps growing
    from labkit.view.live.verdict import not_a_number as not_a_number  # says since when losses are NaN or infinite
    from labkit.view.live.verdict import verdict as verdict  # what is wrong with a run, the most urgent first
    from labkit.view.report import static_bundle as static_bundle  # a run without scripts or widgets, as a MIME bundle
    from labkit.view.report import write_report as write_report  # writes report.html
    from labkit.view.report_facts import report_data as report_data  # what a report says, for a program
    from labkit.view.run_facts import facts_of as facts_of  # a run for a program
    from labkit.view.run_facts import progress_facts as progress_facts  # how far a run is, for programs
    from labkit.view.run_list import RunList as RunList  # many runs as one table
    from labkit.view.tables import aligned as aligned  # a table as lines of text
    from labkit.view.tables import grid as grid  # a table as HTML
    from labkit.view.timeline import Timeline as Timeline  # the profiled steps of a run
else:
    __getattr__, __dir__ = face(__name__)
