"""Reports on finished runs: tables on the terminal, plots, Markdown, CSV, LaTeX and HTML, with their explanations.

Reads files only: imports `_core`, `evaluation.matrix`, `evaluation.details`, `runs.record` and `studies.record`.
"""
