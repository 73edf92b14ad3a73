"""The numbered notebooks run by papermill as a user runs them, and what each of their cells shows."""

from pathlib import Path

import nbformat
import papermill
from papermill.engines import Engine, papermill_engines

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NUMBERED = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


class InProcess(Engine):
    """A papermill engine without kernels: cells run here, in a fresh namespace, their displays kept.

    Seven kernels would load torch seven times. That a kernel does the same, the report's tests see.
    """

    @classmethod
    def execute_managed_notebook(cls, manager, kernel_name, **kwargs):
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output

        shell = InteractiveShell.instance()
        shell.reset(new_session=True)
        for index, cell in enumerate(manager.nb.cells):
            if cell.cell_type != "code":
                continue
            manager.cell_start(cell, index)
            with capture_output() as shown:
                result = shell.run_cell(cell.source)
            result.raise_error()
            data, _ = shell.display_formatter.format(result.result)
            cell.outputs = [nbformat.v4.new_output("execute_result", data)]
            cell.outputs += [nbformat.v4.new_output("stream", name="stderr", text=shown.stderr)]
            cell.execution_count = index
            manager.cell_complete(cell, index)


papermill_engines.register("in_process", InProcess)


def run(path, target, **given):
    """The notebook, executed with these parameters; its output is `target`."""
    return papermill.execute_notebook(path, target, given, engine_name="in_process", progress_bar=False)


def shown(notebook):
    """One text a code cell: its HTML, or "picture"; the parameters' cells left out."""
    cells = [c for c in notebook.cells if c.cell_type == "code" and not c.metadata.get("tags")]
    data = [c.outputs[0]["data"] for c in cells]
    return ["picture" if "image/png" in d else d.get("text/html", "nothing") for d in data]
