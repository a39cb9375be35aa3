"""Accuracy, the accuracy matrix with TDG, TDA and FA, and statistics over seeds.

Only ``accuracy`` reads labels of targets. Imports ``streams`` and what lies below it; ``matrix`` and ``statistics``
need no torch.
"""
