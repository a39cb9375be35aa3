"""Files, locks, schemas, notes, environment and randomness: what every room needs and none owns.

Knows nothing of images or learning. Imports only `config` and `errors`.
"""
