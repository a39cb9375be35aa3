"""Grids of runs, from a TOML file to a set of run directories.

Imports `executors` and the layers below it.
"""
