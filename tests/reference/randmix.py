"""RandMix on one image at a time, with convolutions written as loops."""

import numpy as np

DROPOUT = 0.2


def convolve(image, weight, bias):
    """Valid cross-correlation of (3, h, w) with weights (out, in, k, k)."""
    size = weight.shape[-1]
    height, width = image.shape[1] - size + 1, image.shape[2] - size + 1
    out = np.zeros((weight.shape[0], height, width))
    for channel in range(weight.shape[0]):
        for row in range(height):
            for column in range(width):
                patch = image[:, row : row + size, column : column + size]
                out[channel, row, column] = np.sum(patch * weight[channel]) + bias[channel]
    return out


def convolve_transposed(image, weight, bias):
    """Every pixel stamps its kernel on the output; weights (in, out, k, k)."""
    size = weight.shape[-1]
    height, width = image.shape[1] + size - 1, image.shape[2] + size - 1
    out = np.zeros((weight.shape[1], height, width))
    for channel in range(image.shape[0]):
        for row in range(image.shape[1]):
            for column in range(image.shape[2]):
                stamp = image[channel, row, column] * weight[channel]
                out[:, row : row + size, column : column + size] += stamp
    return out + bias[:, None, None]


def instance_norm(image):
    out = np.zeros_like(image)
    for channel, plane in enumerate(image):
        mean = plane.sum() / plane.size
        variance = ((plane - mean) ** 2).sum() / plane.size
        out[channel] = (plane - mean) / np.sqrt(variance + 1e-5)
    return out


def autoencode(image, encoder, decoder, linear, noise, adain):
    hidden = instance_norm(convolve(image, *encoder))
    weight, bias = linear
    values = weight @ noise + bias
    scale, shift = values[:3], values[3:]
    if adain == "residual":
        scale = 1 + scale
    return convolve_transposed(scale[:, None, None] * hidden + shift[:, None, None], *decoder)


def randmix(images, draw, *, tanh, adain, renormalise, mean, std):
    """Augments ``images`` with the random numbers of ``draw``, an object holding arrays."""
    out = []
    for index, image in enumerate(images):
        inputs = image if draw.input_noise is None else image + draw.input_noise[index]
        terms = []
        if draw.colour is not None:
            coloured = convolve(inputs, draw.colour.weight, draw.colour.bias)
            coloured = np.where(draw.colour_keep[index], coloured / (1 - DROPOUT), 0.0)
            terms.append(np.tanh(coloured) if tanh else coloured)
        for branch in draw.branches:
            noise = branch.noise[index if len(branch.noise) > 1 else 0]
            encoder = branch.encoder.weight, branch.encoder.bias
            decoder = branch.decoder.weight, branch.decoder.bias
            linear = branch.adain.weight, branch.adain.bias
            coded = autoencode(inputs, encoder, decoder, linear, noise, adain)
            terms.append(np.tanh(coded) if tanh else coded)
        terms.append(image)
        weights = draw.weights[index if len(draw.weights) > 1 else 0]
        mixed = sum(weight * term for weight, term in zip(weights, terms, strict=True)) / sum(weights)
        squashed = 1 / (1 + np.exp(-mixed))
        out.append((squashed - mean[:, None, None]) / std[:, None, None] if renormalise else squashed)
    return np.stack(out)
