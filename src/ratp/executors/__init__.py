"""Where several runs execute: side by side in this process, in worker processes, on several devices, on Ray.

Imports `runs` and what lies below it.
"""
