"""The contract between methods and the harness, and the loop that trains.

A method (`method`) returns phases, and the loop trains them (`phase`). `phases`, `recipe` and `memory` have base classes
and parts for methods. Imports `_core`, `data`, `functional` and `networks`.
"""
