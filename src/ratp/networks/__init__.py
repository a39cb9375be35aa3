"""Networks, their pretrained weights, and the import of foreign checkpoints.

Imports `_core`, `config`, `errors`, `data` and `functional`.
"""
