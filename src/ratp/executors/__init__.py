"""Executes several runs: side by side in this process, in worker processes, on several devices, on Ray.

Imports `runs` and the layers below it.
"""
