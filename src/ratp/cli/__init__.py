"""The command line.

Imports every other room; nothing imports it.
"""
