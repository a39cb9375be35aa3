"""Accuracy, the accuracy matrix with TDG, TDA and FA, and statistics over seeds.

Only ``accuracy`` reads labels of targets. Imports ``streams`` and the layers below it; ``matrix`` needs no torch.
"""
