"""Stochastic gradient descent: the learning rate over a stage, and updates of a single number."""

from __future__ import annotations


def learning_rate(initial, schedule, epoch, epochs):
    """The rate of an epoch, counted from 0.

    The published code sets it after each epoch, from the index of the one just finished.
    """
    if schedule == "constant" or epoch == 0:
        return initial
    return initial * (1 + 10 * (epoch - 1) / epochs) ** -0.75


def sgd_path(weight, gradients, rates, momentum, weight_decay):
    """A single weight after every update."""
    path, velocity = [], 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + gradient + weight_decay * weight
        weight -= rate * velocity
        path.append(weight)
    return path
