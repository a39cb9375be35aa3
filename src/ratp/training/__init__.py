"""The contract between methods and the harness, and the loop that trains.

A method (`method`) returns phases, and the loop trains them (`phase`). Methods are built from `phases`, `recipe` and
`memory`. Imports `_core`, `data`, `functional` and `networks`.
"""
