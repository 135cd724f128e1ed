"""Sphinx reads this; `make docs` runs it by docs/build_site.py, on a copy of the repository in build/docs-source."""

import labkit

project = "labkit"
author = "the labkit authors"
copyright = "the labkit authors; MIT licence"
release = version = labkit.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md", "notebooks/*.md", "notebooks/*.ipynb"]
root_doc = "index"

# Pages are the repository's Markdown as GitHub shows it; notebooks are shown as they were executed.
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

# Docstrings are plain text with code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 80

html_theme = "furo"
html_title = "labkit"
html_static_path = ["static"]  # beside this file
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
