"""The style module of "Learning to Diversify" (ICCV 2021), section 3.1: random autoencoders with a trained middle.

A branch is a convolution, instance normalisation with a scale and a shift for every pixel, and a transposed
convolution, each branch with its own kernel size; one more branch is a 1×1 convolution, which changes colours:

    B_i(x) = tanh( dec_i( γ_i·IN(enc_i(x)) + β_i ) ),   B_0(x) = tanh( W x + b )

Scales γ, shifts β and the level of a noise added to x are trained, convolutions never are. In use, convolutions and
mixing weights w are drawn anew in every call, and colours drop out here and there: Σ w_i·B_i(x) / Σ w_i. For its own
training the module has convolutions that stay, and the mean of the branches. The result's σ, normalised, is mixed with
the images themselves (:class:`ratp.parts.style_draw.Blend`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp import kernels
from ratp.errors import ConfigError
from ratp.parts.randmix_draw import COLOUR_DROPOUT, SMALLEST_WEIGHT_SUM
from ratp.parts.random_convolutions import CHANNELS, Layers, convolution, transposed_convolution
from ratp.parts.style_draw import Blend, Chance

NOISE_UNIT = 0.01
SPREAD = 0.1
EPSILON = 1e-5


class StyleModule(nn.Module):
    """Changes the style of images.

    Attributes:
        noise_level: Of the noise added to images, in hundredths; 0 at first.
        scales: γ, one a branch, shape (3, height − k + 1, width − k + 1), N(1, 0.1) at first.
        shifts: β, likewise, N(0, 0.1) at first.
        fixed: All numbers of the convolutions that stay.
    """

    fixed: Tensor

    def __init__(self, image_size: tuple[int, int], kernel_sizes: Sequence[int] = (9, 13, 17, 5)) -> None:
        """Makes a module with random numbers, drawn from torch's generator.

        Args:
            image_size: Height and width of the images.
            kernel_sizes: k of each autoencoder.

        Raises:
            ConfigError: If the images are too small for a kernel.
        """
        super().__init__()
        height, width = image_size
        if min(image_size) <= max(kernel_sizes):
            raise ConfigError(
                f"images of {height}×{width} are too small for a style kernel of {max(kernel_sizes)}: "
                f"set kernel_sizes to numbers below {min(image_size)}."
            )
        self.noise_level = nn.Parameter(torch.zeros(()))
        shapes = [(CHANNELS, height - k + 1, width - k + 1) for k in kernel_sizes]
        self.scales = nn.ParameterList(nn.Parameter(1 + SPREAD * torch.randn(shape)) for shape in shapes)
        self.shifts = nn.ParameterList(nn.Parameter(SPREAD * torch.randn(shape)) for shape in shapes)
        self._kernel_sizes = tuple(kernel_sizes)
        self._layers = Layers([1, *(k for k in kernel_sizes for _ in range(2))])
        self.register_buffer("fixed", self._layers.numbers("uniform", torch.default_generator))

    def restyle(self, images: Tensor, blend: Blend, generator: torch.Generator) -> Tensor:
        """Images in new styles by convolutions and mixing weights drawn now; no gradient is recorded.

        Args:
            images: Normalised, shape (n, 3, height, width).
            blend: How a style is put on them.
            generator: Source of the random numbers.
        """
        device = generator.device
        with torch.no_grad():
            noise = torch.randn(images.shape, generator=generator, device=device)
            numbers = self._layers.numbers("uniform", generator)
            keep = torch.rand(images.shape, generator=generator, device=device) >= COLOUR_DROPOUT
            weights = torch.randn(len(self.scales) + 1, generator=generator, device=device)
            if self._kernel_takes(images):
                from ratp.kernels import style

                images = images.contiguous()
                row = torch.cat([part.reshape(-1) for part in (*self.scales, *self.shifts)])
                inputs, chance = self._noisy(images, noise), Chance(weights, keep)
                return style.restyle(images, inputs, numbers, self._kernel_sizes, row, chance, blend)
            total = weights.sum()
            shares = weights / torch.copysign(total.abs().clamp_min(SMALLEST_WEIGHT_SUM), total)
            branches = self._branches(images, noise, numbers, keep / (1 - COLOUR_DROPOUT))
            # Σ w_i·B_i(x) / Σ w_i
            return blend(images, (shares.view(-1, 1, 1, 1, 1) * branches).sum(dim=0))

    def estimate(self, images: Tensor, blend: Blend, generator: torch.Generator) -> Tensor:
        """Images in new styles by the convolutions that stay: what the module learns by.

        Args:
            images: Normalised, shape (n, 3, height, width).
            blend: How a style is put on them.
            generator: Source of the noise.
        """
        noise = torch.randn(images.shape, generator=generator, device=generator.device)
        if self._kernel_takes(images):
            from ratp.kernels import style

            return style.estimate(
                images,
                noise,
                NOISE_UNIT,
                self.fixed,
                self._kernel_sizes,
                blend,
                self.noise_level,
                list(self.scales),
                list(self.shifts),
            )
        return blend(images, self._branches(images, noise, self.fixed, None).mean(dim=0))

    def _kernel_takes(self, images: Tensor) -> bool:
        """Whether kernels of ours do all of it."""
        if not kernels.usable(images.device):
            return False
        from ratp.kernels import style

        return style.fits(images)

    def _noisy(self, images: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(images, self.noise_level, noise, value=NOISE_UNIT)

    def _branches(self, images: Tensor, noise: Tensor, numbers: Tensor, keep: Tensor | None) -> Tensor:
        """B_i(x), colours first, shape (branches, n, 3, height, width)."""
        inputs = self._noisy(images, noise)
        colour, *layers = self._layers.split(numbers)
        colours = F.conv2d(inputs, colour.weight, colour.bias)
        results = [colours if keep is None else colours * keep]
        for encoder, decoder, scale, shift in zip(layers[::2], layers[1::2], self.scales, self.shifts, strict=True):
            hidden = F.instance_norm(convolution(inputs, encoder), eps=EPSILON)
            results.append(transposed_convolution(torch.addcmul(shift, scale, hidden), decoder))
        return torch.stack(results).tanh()
