"""How a deployment adapts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ratp.errors import ConfigError, unknown

Adapt = Literal["never", "ask", "auto", "online"]
POLICIES: tuple[Adapt, ...] = get_args(Adapt)
# Values of the recipe that a deployment may change, because they only shorten or soften a stage.
CHANGEABLE = "epochs", "steps", "batch", "lr"


@dataclass(frozen=True)
class Settings:
    """How a deployment adapts.

    Attributes:
        adapt: ``never``; ``ask``: only when :meth:`Deployment.adapt` is called; ``auto``: in the background, once the
            alarm is at ``drifted`` and enough images have arrived since it first rose; ``online``: to every window of
            images as it arrives, for methods that can.
        at_least: Images that a stage in the background needs.
        save_every: Windows of 64 images between two versions, with ``online``.
        changes: Values for ``epochs``, ``steps``, ``batch`` and ``lr`` of a stage.
    """

    adapt: Adapt = "ask"
    at_least: int = 256
    changes: Mapping[str, Any] | None = None
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.adapt not in POLICIES:
            raise ConfigError(unknown("policy", self.adapt, POLICIES))
        if self.at_least < 2:
            raise ConfigError(f"at_least must be 2 or more; got {self.at_least}.")
        if self.save_every < 1:
            raise ConfigError(f"save_every must be 1 or more; got {self.save_every}.")
        other = [name for name in self.changes or {} if name not in CHANGEABLE]
        if other:
            raise ConfigError([unknown("value of a deployment", name, CHANGEABLE) for name in other])
