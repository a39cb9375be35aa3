"""Tables, plots and pages, made from run directories.

Reads files only: imports `_core`, `evaluation.matrix`, `evaluation.statistics`, `runs.record` and `studies.record`.
"""
