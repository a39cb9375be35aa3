"""Judges a finished stage without labels: keep the new model, or go back to the one before.

Imports `training` and the layers below it.
"""
