"""What a stage of a deployment needs: a copy of the model, images apart for the alarm, and references afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.config import override
from ratp.data.domain import UnlabelledDomain
from ratp.deploy.drift import LEAST_IMAGES, Reference
from ratp.deploy.model import Model
from ratp.deploy.settings import Settings
from ratp.deploy.store import Store
from ratp.errors import ConfigError
from ratp.runs.load import LoadedRun
from ratp.training.method import Method

# Images of a known domain that are stored, and the share of a new domain that is not trained on: the alarm learns from
# it what the domain looks like to the adapted model.
KNOWN_IMAGES, HELD_BACK = 400, 0.2


def copy_of(load: Callable[[], LoadedRun], model: Model, settings: Settings) -> Method:
    """Builds a model once more, to be trained with the values of the settings."""
    method = load().method
    method.load_state(model.state())
    if settings.changes:
        setting = getattr(method, "setting", None)
        if setting is None:
            raise ConfigError(f"{method.name} cannot take other values than those it was trained with.")
        recipe = override(setting.recipe, settings.changes)
        method.setting = replace(setting, recipe=recipe)  # type: ignore[attr-defined]
    return method


def split(domain: UnlabelledDomain, generator: torch.Generator) -> tuple[UnlabelledDomain, UnlabelledDomain]:
    """Returns the images to train on and those to calibrate the alarm on: apart, if there are enough."""
    order = torch.randperm(len(domain), generator=generator)
    count = max(LEAST_IMAGES, round(HELD_BACK * len(domain)))
    if count > len(domain) // 2:
        return domain, replace(domain, images=domain.images[order])
    kept, rest = order[:count], order[count:].sort().values
    return replace(domain, images=domain.images[rest]), replace(domain, images=domain.images[kept])


def references_after(
    model: Model, store: Store, names: Sequence[str], kept: UnlabelledDomain, loaded: LoadedRun
) -> list[Reference]:
    """Stores images of a new domain; returns how a model predicts those of all domains it now knows."""
    store.keep_images(kept.name, kept.images[:KNOWN_IMAGES].cpu())
    known = [name for name in names if name != kept.name]
    known += [kept.name] if len(kept) >= LEAST_IMAGES else []
    return [reference_of(model, name, store.images(name)["images"], loaded) for name in known]


def reference_of(model: Model, name: str, images: Tensor, loaded: LoadedRun) -> Reference:
    """Returns how a model predicts images of a known domain."""
    generator = randomness_of(loaded).generator("deploy", "alarm", name)
    return Reference.of(name, model.predictions(images), generator)


def randomness_of(loaded: LoadedRun) -> Randomness:
    """Returns the randomness of a deployed run."""
    return Randomness(int(loaded.config["seed"]))
