"""What pictures show is data: `Chart`, `Bars` and `Lanes`. `drawn` makes SVG of it, `figure` a plotly figure."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.charts.animated import animation as animation  # Lanes with a Play button, by plotly
    from labkit.charts.bands import Column as Column  # the values of ranks at one place of a chart
    from labkit.charts.bands import columns as columns  # the points of all ranks on one grid
    from labkit.charts.bands import outlier as outlier  # the rank that stands out
    from labkit.charts.bands import ranges as ranges  # the extremes and the median of each place on the grid
    from labkit.charts.data import Bar as Bar  # memory by category, of a plan or as measured
    from labkit.charts.data import Bars as Bars  # stacked bars against a limit
    from labkit.charts.data import Chart as Chart  # lines over one axis
    from labkit.charts.data import Lanes as Lanes  # what each rank did, and when
    from labkit.charts.data import Line as Line  # a curve
    from labkit.charts.data import Points as Points  # a curve whose points are all known
    from labkit.charts.images import Palette as Palette  # the colours and marks of all pictures
    from labkit.charts.images import Picture as Picture  # a drawing as SVG
    from labkit.charts.images import as_image as as_image  # a page with its SVG as images
    from labkit.charts.images import dot as dot  # a rank's line style as a mark for tables
    from labkit.charts.images import spark_svg as spark_svg  # draws a curve in the space of a word
    from labkit.charts.images import spark_text as spark_text  # the same as text
    from labkit.charts.interactive import figure as figure  # makes a plotly figure of the data
    from labkit.charts.lanes import lanes_picture as lanes_picture  # lanes whose bars have titles, for a report
    from labkit.charts.line_charts import CLIPS as CLIPS  # by which a page clips charts that it has zoomed
    from labkit.charts.line_charts import beside_each_other as beside_each_other  # charts as HTML
    from labkit.charts.line_charts import pictures as pictures  # draws each chart for itself
    from labkit.charts.raster import png as png  # draws charts as PNG, for viewers that strip SVG
    from labkit.charts.still import drawn as drawn  # draws the data as HTML with SVG
    from labkit.charts.still import picture as picture  # draws the data as one SVG element
else:
    __getattr__, __dir__ = face(__name__)
