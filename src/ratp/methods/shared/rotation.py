"""The rotation task that SHOT+ adds to SHOT: by how many quarter turns an image was rotated."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp._core.state import Stateful
from ratp.errors import ConfigError
from ratp.functional.numerics import in_chunks
from ratp.networks.network import Network
from ratp.training.finite import log_draw
from ratp.training.memory import Views
from ratp.training.method import Setting
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, embed_all

# Number of images to rotate at once: rotating a whole domain would need several copies of it.
ROTATED = 1024
TURNS = 4


def rotate(images: Tensor, turns: Tensor) -> Tensor:
    """Rotates each image (n, c, s, s) by its number of quarter turns, from 0 to 3."""
    turns = turns[:, None, None, None]
    turned = images
    for number in range(1, TURNS):
        turned = torch.where(turns == number, torch.rot90(images, number, (2, 3)), turned)
    return turned


def draw_turns(count: int, generator: torch.Generator) -> Tensor:
    """Draws numbers of quarter turns, shape (count,)."""
    return torch.randint(TURNS, (count,), generator=generator, device=generator.device)


def rotation_input(upright: Tensor, turned: Tensor) -> Tensor:
    """Returns the rotation head's input [sg(z(x)); z(rot x)]; no gradient reaches the upright half."""
    return torch.cat([upright.detach(), turned], dim=1)


class RotationTask(Stateful):
    """Predicts by how many quarter turns an image was rotated, from its embedding and that of the rotated image."""

    saved = "head generator"

    def __init__(self, setting: Setting, stage: int, weight: float) -> None:
        """Creates a new head; refuses images that are not square."""
        height, width = setting.image_size
        if height != width:
            raise ConfigError(f"images of {height}×{width} cannot be rotated by quarter turns: make them square.")
        with setting.randomness.scope("rotation head", stage):
            head = nn.Linear(2 * setting.recipe.network.dim, TURNS)  # R, from both embeddings to the four turns
        self.head = head.to(setting.device)
        self.generator = setting.generator("rotation", stage)  # the generator of the turns
        self.weight = weight  # γ, the weight of the loss

    def loss(self, network: Network, images: Tensor, upright: Tensor) -> Tensor:
        """Computes γ·cross-entropy of the turns; the gradient flows through the rotated images only."""
        turns = draw_turns(len(images), self.generator)
        turned = network(rotate(images, turns)).embedding
        return self.weight * F.cross_entropy(self.head(rotation_input(upright, turned)), turns)


class RotationPhase(Phase):
    """Trains a rotation head with the network frozen, and keeps the head of the best epoch (the last if several)."""

    name = "rotation"
    captures = True
    saved = "_optimiser _head _measuring _pairs _best _kept"

    def __init__(self, method: NetworkMethod, images: Tensor, task: RotationTask) -> None:
        setting, recipe, stage = method.setting, method.setting.recipe, method.stage
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._setting, self._network, self._images, self._head = setting, method.network, images, task.head
        self._views = Views(setting, "rotation", stage)
        self._turns, self._measuring = (setting.generator(f"rotation {use}", stage) for use in ("turns", "measuring"))
        self.generators = *self._views.generators, self._turns
        self._optimiser = method.optimiser(task.head.parameters())
        self._pairs: tuple[Tensor, Tensor] | None = None
        self._best = -1.0
        self._kept: dict[str, Tensor] = {}

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; measures the head after the previous epoch."""
        lr = self._optimiser.begin_epoch(epoch)
        return {"lr": lr} | ({"rotation_accuracy": self._measure()} if epoch else {})

    def step(self) -> dict[str, Tensor]:
        """Updates the head on randomly rotated images."""
        network = self._network.eval()
        place, chosen = self._views.draw(self._images, self._setting.recipe.batch)
        log_draw(place)
        images = self._views.change(chosen)
        turns = draw_turns(len(images), self._turns)
        with torch.no_grad():
            pairs = rotation_input(network(images).embedding, network(rotate(images, turns)).embedding)
        loss = F.cross_entropy(self._head(pairs), turns)
        self._optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Restores the best head."""
        self._measure()
        self._pairs = None
        self._head.load_state_dict(self._kept)
        return {"rotation_accuracy": self._best}

    @torch.no_grad()
    def _measure(self) -> float:
        """Measures the head's accuracy on every image, each rotated once for the whole phase; keeps the best."""
        if self._pairs is None:
            turns = draw_turns(len(self._images), self._measuring)
            upright = embed_all(self._network, self._setting, self._images)[0]
            rotated = in_chunks(lambda rows: (rotate(self._images[rows], turns[rows]),), len(turns), ROTATED)[0]
            turned = embed_all(self._network, self._setting, rotated)[0]
            self._pairs = rotation_input(upright, turned), turns
        pairs, turns = self._pairs
        accuracy = float((self._head(pairs).argmax(dim=1) == turns).float().mean())
        if accuracy >= self._best:
            self._best = accuracy
            self._kept = {name: tensor.clone() for name, tensor in self._head.state_dict().items()}
        return accuracy
