"""Stochastic gradient descent on single numbers, with momentum and weight decay."""


def sgd_path(weight, gradients, rates, momentum, weight_decay):
    """The weight after every update."""
    path, velocity = [], 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + gradient + weight_decay * weight
        weight -= rate * velocity
        path.append(weight)
    return path
