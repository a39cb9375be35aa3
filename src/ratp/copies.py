"""RandMix copies for methods that have none of their own, as the paper's ablation adds them.

On the source every image gets a copy with its label. On a target those images get one the model is confident about; all
are copied, so that shapes never depend on data, and the others are left out of BatchNorm and losses by a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratp.config import switch
from ratp.errors import ConfigError
from ratp.method import Setting, pack, unpack
from ratp.network import Network, Output
from ratp.parts.batch_norm import only_rows, supports_row_masks
from ratp.parts.randmix import RandMix, RandMixConfig, check_kernels
from ratp.recipe import Scaling
from ratp.training import NetworkMethod


@dataclass(frozen=True)
class CopiesConfig:
    """Switches of the copies."""

    augment: bool = switch(False, "RandMix copies of source images and of confident target images")
    r_con: float = switch(0.8, "confidence above which a target image gets a copy", minimum=0, maximum=1)
    randmix: RandMixConfig = switch(RandMixConfig(), "augmentation, if it is on")


def make_randmix(setting: Setting, config: CopiesConfig, network: Network) -> RandMix | None:
    """What makes the copies; None: nothing does.

    Raises:
        ConfigError: If the images are too small for its kernels, or the network's BatchNorm cannot leave images out.
    """
    if not config.augment:
        return None
    check_kernels(config.randmix, setting.image_size)
    if not supports_row_masks(network):
        raise ConfigError(
            f"augment: BatchNorm of {setting.recipe.network.backbone} cannot leave images out; "
            "set augment to false or network.backbone to dtn or a resnet."
        )
    scaling = setting.scaling()
    return RandMix(config.randmix, scaling.mean, scaling.std, setting.generator("randmix layers"))


def three_draws(randmix: RandMix, scaling: Scaling, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """What RandMix makes of uint8 images in three draws, for the report."""
    inputs = scaling(images)
    return {f"RandMix {i}": scaling.invert(randmix(inputs, generator)) for i in (1, 2, 3)}


class Copies:
    """The copies of one stage.

    Attributes:
        generators: What they are drawn from.

    Args:
        setting: Randomness and device.
        stage: Number of the stage, for the generator.
        network: What learns.
        randmix: What makes them.
        r_con: Confidence above which a target image gets one.
    """

    def __init__(self, setting: Setting, stage: int, network: Network, randmix: RandMix, r_con: float) -> None:
        self._network, self._randmix, self._r_con = network, randmix, r_con
        self._generator = setting.generator("randmix", stage)
        self.generators = (self._generator,)

    def learn_all(self, clean: Tensor) -> Output:
        """Passes normalised images, then a copy of each, through the network in training mode."""
        return self._network.train()(torch.cat([clean, self._randmix(clean, self._generator)]))

    def learn_confident(self, clean: Tensor) -> tuple[Output, Tensor]:
        """The same, with the information which rows count: all images, and the copies of confident ones."""
        with torch.no_grad():
            confidence = self._network.eval()(clean).logits.softmax(dim=1).amax(dim=1)
        selected = confidence > self._r_con
        # A copy that does not count is at least an image: no number of it can spoil the others.
        copies = self._randmix(clean, self._generator).where(selected[:, None, None, None], clean)
        valid = torch.cat([torch.ones_like(selected), selected])
        with only_rows(self._network, valid):
            return self._network.train()(torch.cat([clean, copies])), valid


class CopyingMethod(NetworkMethod):
    """A method whose switches are :class:`CopiesConfig`'s among others.

    Attributes:
        randmix: What makes copies; None: nothing does.
    """

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self.randmix = make_randmix(setting, config, self.network)

    def copies(self) -> Copies | None:
        """The copies of the stage's images; None: there are none."""
        if self.randmix is None:
            return None
        return Copies(self.setting, self.stage, self.network, self.randmix, self.config.r_con)

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Three RandMix draws of the images, where it is used."""
        return {} if self.randmix is None else three_draws(self.randmix, self.scaling, images, generator)

    def state(self) -> dict[str, Tensor]:
        """Network, memory, and RandMix's fixed layers where it is used."""
        return super().state() | ({} if self.randmix is None else pack({"randmix": self.randmix.state()}))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        if self.randmix is not None:
            self.randmix.load_state(unpack(state)["randmix"])
