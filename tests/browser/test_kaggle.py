"""An exported notebook in the editor: JupyterLab on a kernel with Kaggle's versions, in an interactive session."""

from __future__ import annotations

import nbformat

from labkit.kaggle.kernel_files import build

SESSION = "import os\nos.environ |= {'KAGGLE_KERNEL_RUN_TYPE': 'Interactive', 'LABKIT_SESSION_SECONDS': '1000000000'}"
LAUNCH = "import labkit\nrun = labkit.launch('ddp', nproc_per_node=2, steps=60, global_batch_size=4)"


def test_an_exported_notebook_is_live_in_the_editor_and_saves_before_the_session_ends(notebook, kaggle_kernel):
    cells = [nbformat.v4.new_code_cell(source) for source in (LAUNCH, "run.wait()")]
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    kernel = build(text, name="small.ipynb", user="me", push="0a1b")
    exported = [cell.source for cell in nbformat.reads(kernel.notebook, 4).cells]
    notebook.open([SESSION, *exported], kernel=kaggle_kernel)

    for cell in range(4):
        notebook.run(cell)

    notebook.wait_for_text(1, kernel.mark)
    notebook.wait_for_text(2, "Kaggle sessions are limited: this run saves and stops after 99", 60)
    notebook.output(2).locator("svg[role=img]").first.wait_for(timeout=60_000)
    notebook.wait_for_text(3, "succeeded after", 120)
    notebook.wait_for_text(2, "step 60 of 60")
    assert not notebook.errors
    notebook.picture("kaggle")
