"""Tables, plots and pages from run directories.

Reads files only: imports `_core`, `evaluation.matrix`, `runs.record` and `studies.record`.
"""
