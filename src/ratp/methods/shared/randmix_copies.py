"""RandMix copies for methods whose papers have none, as the ablation of RaTP's paper adds them.

On the source, every image gets a copy with its label. On a target, images the model is confident about get one: all
are copied, so that shapes never depend on data, and a mask leaves the others out of BatchNorm and losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratp.config import switch
from ratp.errors import ConfigError
from ratp.functional.norm import only_rows, supports_row_masks
from ratp.functional.randmix import RandMix, RandMixConfig, check_kernels
from ratp.networks.network import Network, Output
from ratp.training.method import Setting
from ratp.training.phases import NetworkMethod

AUGMENT = "RandMix copies of source images and of confident target images"
R_CON = "confidence above which a target image gets a copy"
RANDMIX = "augmentation, if augment is on"


@dataclass(frozen=True)
class CopiesConfig:
    """Switches of the copies."""

    augment: bool = switch(False, AUGMENT)
    r_con: float = switch(0.8, R_CON, minimum=0, maximum=1)
    randmix: RandMixConfig = switch(RandMixConfig(), RANDMIX)


@dataclass(frozen=True)
class LaterCopiesConfig(CopiesConfig):
    """The same for a method that had no copies at first: the hashes of its runs without copies stay valid."""

    augment: bool = switch(False, AUGMENT, hash_default=False)
    r_con: float = switch(0.8, R_CON, minimum=0, maximum=1, hash_default=False)
    randmix: RandMixConfig = switch(RandMixConfig(), RANDMIX, hash_default=False)


class Copies:
    """The RandMix copies of a stage's images; without ``randmix`` there are none."""

    def __init__(
        self,
        method: NetworkMethod,
        randmix: RandMix | None = None,
        r_con: float = 1.0,
        *,
        network: Network | None = None,  # what learns; None: the method's network
        use: str = "randmix",  # name of the generator
    ) -> None:
        self._network, self._randmix, self._r_con = network or method.network, randmix, r_con
        self.generators = () if randmix is None else (method.setting.generator(use, method.stage),)

    def learn_all(self, clean: Tensor) -> Output:
        """Passes normalised images, then a copy of each, through the network in training mode."""
        if self._randmix is None:
            return self._network.train()(clean)
        return self._network.train()(torch.cat([clean, self._randmix(clean, *self.generators)]))

    def learn_confident(self, clean: Tensor) -> tuple[Output, Tensor | None]:
        """Passes both, and returns which rows count: all images, and the copies of confident ones; None: all rows."""
        if self._randmix is None:
            return self._network.train()(clean), None
        with torch.no_grad():
            confidence = self._network.eval()(clean).logits.softmax(dim=1).amax(dim=1)
        selected = confidence > self._r_con
        # Masked rows hold the clean image, so that a NaN in an unwanted copy cannot poison the others.
        copies = self._randmix(clean, *self.generators).where(selected[:, None, None, None], clean)
        valid = torch.cat([torch.ones_like(selected), selected])
        with only_rows(self._network, valid):
            return self._network.train()(torch.cat([clean, copies])), valid


class CopyingMethod(NetworkMethod):
    """A method whose config includes :class:`CopiesConfig`, or its ``augment`` and ``randmix`` at least."""

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self.randmix: RandMix | None = None
        if config.augment:
            check_kernels(config.randmix, setting.image_size)
            if self.masks_copies(config) and not supports_row_masks(self.network):
                raise ConfigError(
                    f"augment: BatchNorm of {setting.recipe.network.backbone} cannot leave images out; "
                    "set augment to false or network.backbone to dtn or a resnet."
                )
            layers = setting.generator("randmix layers")
            self.randmix = RandMix(config.randmix, self.scaling.mean, self.scaling.std, layers)
            self.extras = {"randmix": self.randmix}

    @classmethod
    def masks_copies(cls, config: Any) -> bool:
        """Whether some images get no copy, which a mask then leaves out of BatchNorm."""
        del config
        return True

    def copies(self) -> Copies:
        """Returns the copies of the stage's images."""
        return Copies(self, self.randmix, self.config.r_con)

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns three RandMix copies of the images, if ``augment`` is on."""
        if self.randmix is None:
            return {}
        inputs = self.scaling(images)
        return {f"RandMix {i}": self.scaling.invert(self.randmix(inputs, generator)) for i in (1, 2, 3)}
