"""The command line: its commands and options, what they print while they work, messages and exit codes.

What a report says about finished runs comes from `reports`. Imports every other room; none imports it.
"""
