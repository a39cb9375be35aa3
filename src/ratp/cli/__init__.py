"""The command line.

Imports every other package; none imports it.
"""
