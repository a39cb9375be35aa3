"""The contract between methods and the harness, and the loop that trains.

A method (`method`) gives phases (`phase`), the loop drives them; `recipe`, `memory` and `inference` are what methods
share. Imports `_core`, `data`, `functional` and `networks`.
"""
