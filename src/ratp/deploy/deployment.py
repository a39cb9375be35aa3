"""A trained model in use: predicts, observes what arrives, adapts and goes back.

Predictions always come from the current *version*. Adapting trains a copy; if the guard accepts the result, it becomes
the next version in one step, on disk first and then in memory. So a process that is killed at any moment comes back
with the last version that was accepted, bit for bit. Adapting online changes the model that answers, window by window
(:mod:`ratp.deploy.online`), and versions of it are saved from time to time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ratp.data.domain import LabelledDomain, UnlabelledDomain, check_images
from ratp.deploy.drift import WINDOW, Level, Window
from ratp.deploy.model import AnswerError, Model
from ratp.deploy.observer import Baseline, Observer, recent_images
from ratp.deploy.online import LOST, Online, check_online
from ratp.deploy.settings import Settings
from ratp.deploy.stages import KNOWN_IMAGES, copy_of, randomness_of, reference_of, references_after, split
from ratp.deploy.store import Store, Version
from ratp.errors import ConfigError, RatpError, TrainingError, brief
from ratp.guard.watch import Predictions, Watch, gain, recognition
from ratp.networks.own import Given
from ratp.runs.load import load
from ratp.training.finite import lost_weights
from ratp.training.phase import train

# Images that stand for the source if there are none of it, and what they are called.
BASELINE, FIRST = 256, "first images"
# While the model adapts online, recognition is checked in one of so many windows.
RECOGNISED_EVERY = 10


@dataclass(frozen=True)
class Observation:
    """What :meth:`Deployment.observe` says of some images.

    Attributes:
        labels: Names of the predicted classes.
        confidence: The model's probability of each.
        version: Number of the version that predicted.
        level: Level of the alarm after these images.
        windows: What the alarm said of every window that ended with these images.
        causes: Names of the least typical images of these windows, if the level is not ``fine``.
        adapting: Whether a stage is under way in the background.
        events: What adapting online led to: versions that were saved, or answer again.
    """

    labels: tuple[str, ...]
    confidence: tuple[float, ...]
    version: int
    level: Level
    windows: tuple[Window, ...] = ()
    causes: tuple[str, ...] = ()
    adapting: bool = False
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Adaptation:
    """The result of a stage.

    Attributes:
        accepted: Whether the new model answers now.
        version: Number of the version that answers.
        images: Number of images it trained on.
        reasons: The guard's reasons against it.
    """

    accepted: bool
    version: int
    images: int
    reasons: tuple[str, ...] = ()


class Deployment:
    """A model in use, with a directory of its own; several threads may use it, but one process only.

    Create one with :meth:`create`, open it again with ``Deployment(folder)``, and close it at the end, or use it as a
    context manager.

    Examples:
        >>> with ratp.Deployment("deployed") as model:
        ...     seen = model.observe(images)
        ...     if seen.level == "drifted":
        ...         print(model.adapt())
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        device: str = "auto",
        method: Path | str | None = None,
        backbone: Given | None = None,
    ) -> None:
        """Opens the deployment in ``folder``.

        Args:
            folder: Its directory.
            device: Where to compute.
            method: The file of a custom method, a program that is run only because you name it.
            backbone: The network of your own that the model has, as for :func:`ratp.load`.
        """
        self._store = Store(Path(folder))
        self._load = partial(load, Path(folder) / "run", device=device, method=method, backbone=backbone)
        self._mutex = threading.RLock()  # of what observing, adapting and going back change
        self._worker: threading.Thread | None = None
        self._stop = threading.Event()
        self._done: Adaptation | BaseException | None = None
        self._online: Online | None = None
        self._settings = Settings(**self._store.contents.settings)
        try:
            self._use(self._store.contents.current)
        except BaseException:
            self._store.close()
            raise

    @classmethod
    def create(
        cls,
        run: Path | str,
        folder: Path | str,
        source: LabelledDomain | None,
        *,
        settings: Settings | None = None,
        device: str = "auto",
        method: Path | str | None = None,
        backbone: Given | None = None,
    ) -> Self:
        """Starts a deployment of a trained run.

        Args:
            run: The run's directory. It is copied, and not needed afterwards.
            folder: Directory of the deployment; must not exist, or be empty.
            source: Labelled images that the run did not train on. They calibrate the alarm, and show the guard whether
                an adapted model still knows the source. None: the first images that are observed stand for them.
            settings: How to adapt; None: as :class:`Settings` has it.
            device: Where to compute.
            method: The file of a custom method.
            backbone: The network of your own that the run has.
        """
        loaded = load(run, device=device, method=method, backbone=backbone)
        about = settings or Settings()
        if about.adapt == "online":
            check_online(loaded.method)
        why = f"deployed from a run of {loaded.method.name}"
        if source is None:
            with closing(Store.create(Path(run), Path(folder), loaded.classes, asdict(about))) as store:
                store.add(loaded.method.state(), [], why)
            return cls(folder, device=device, method=method, backbone=backbone)
        check_images(source.images, loaded.image_size)
        if source.classes != loaded.classes:
            raise ConfigError(
                f"the source has other classes ({', '.join(source.classes)}) than {run} ({', '.join(loaded.classes)})."
            )
        chosen = torch.randperm(len(source), generator=randomness_of(loaded).generator("deploy", "known"))[
            :KNOWN_IMAGES
        ]
        images, labels = source.images[chosen].cpu(), source.labels[chosen].cpu()
        reference = reference_of(Model(loaded.method, 1), source.name, images, loaded)  # before anything is written
        with closing(Store.create(Path(run), Path(folder), loaded.classes, asdict(about))) as store:
            store.keep_images(source.name, images, labels=labels)
            store.add(loaded.method.state(), [reference], why)
        return cls(folder, device=device, method=method, backbone=backbone)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def settings(self) -> Settings:
        """How it adapts; another value counts until it is closed."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        with self._mutex:
            if settings.adapt == "online":
                check_online(self._model.method)
            self.save()
            changed = (settings.adapt == "online") != (self._settings.adapt == "online")
            self._settings = settings
            if changed:
                self._use(self.version)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits."""
        return self._store.contents.classes

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self._loaded.image_size

    @property
    def folder(self) -> Path:
        """Its directory."""
        return self._store.folder

    @property
    def version(self) -> int:
        """Number of the version that answers."""
        return self._model.version

    @property
    def level(self) -> Level:
        """Level of the alarm."""
        return self._observer.level

    @property
    def adapting(self) -> bool:
        """Whether a stage is under way in the background."""
        return self._worker is not None and self._worker.is_alive()

    @property
    def waiting(self) -> int:
        """Number of recent images that a stage would train on."""
        return self._observer.waiting

    @property
    def adapted(self) -> int:
        """Number of images it has adapted to online since the version."""
        return self._online.images if self._online else 0

    @property
    def ready(self) -> bool:
        """Whether the alarm is at ``drifted`` and enough images have arrived for a stage."""
        return self.level == "drifted" and self.waiting >= self.settings.at_least

    @property
    def room(self) -> int:
        """Number of images that the alarm's current window still needs."""
        return self._online.room if self._online else self._observer.room

    @property
    def is_calibrated(self) -> bool:
        """Whether alarm and guard have images to compare with; else they begin after the first ``BASELINE`` images."""
        return bool(self._references)

    @property
    def false_alarms(self) -> float:
        """Share of windows of source images that would raise the alarm, measured when it was calibrated."""
        return self._references[0].false_alarms if self._references else math.nan

    def history(self) -> tuple[Version, ...]:
        """Returns all versions, oldest first."""
        return self._store.contents.versions

    def predict(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images, shape (N, classes); nothing is remembered of them."""
        check_images(images, self.image_size)
        return self._model.logits(images)

    def answer(self, images: Tensor) -> Observation:
        """Predicts images like :meth:`observe`, but remembers nothing of them."""
        check_images(images, self.image_size)
        model = self._model
        return self._observation(model, model.logits(images).softmax(dim=1))

    def observe(self, images: Tensor, names: Sequence[str] | None = None, *, again: bool = False) -> Observation:
        """Predicts images as they arrive, watches for drift, and adapts if the settings say so.

        Args:
            images: uint8 tensor of shape (N, 3, height, width).
            names: Names of the images, for the alarm; None: their positions.
            again: Whether an earlier process has observed them already: then the alarm counts them, but the journal
                gets no second line, and no stage starts.

        Returns:
            The answers, with the version that gave them and the level of the alarm.
        """
        check_images(images, self.image_size)
        if names is not None and len(names) != len(images):
            raise RatpError(f"{len(names)} names are given for {len(images)} images.")
        called = list(names) if names is not None else [str(k) for k in range(len(images))]
        with self._mutex:
            if self._online is not None:
                return self._observe_online(self._online, images, called, again=again)
        model = self._model
        found = model.predictions(images)
        with self._mutex:
            if model is not self._model:  # a new version answers by now
                return self._observation(model, found.probabilities)
            windows = self._observer.observe(images, found, called)
            for window, causes in () if again else windows:
                self._note_window(window, causes)
            if not self.is_calibrated and self.waiting >= BASELINE:
                self._calibrate()
            if self.settings.adapt == "auto" and self.ready and not self.adapting and not again:
                self.adapt(background=True)
            return self._observation(model, found.probabilities, windows)

    def alarm_state(self) -> dict[str, Any]:
        """Returns what the alarm remembers of complete windows, apart from images, as plain data."""
        return self._observer.state()

    def restore_alarm(self, state: Mapping[str, Any], recent: Tensor) -> None:
        """Restores what :meth:`alarm_state` returned, with the recent images that a stage would train on."""
        with self._mutex:
            self._observer.restore(state, recent)
            if self._online is not None:
                self._online.clear()

    def adapt(
        self, images: Tensor | None = None, *, name: str | None = None, background: bool = False
    ) -> Adaptation | None:
        """Trains a stage on images, and makes its result the next version if the guard accepts it.

        Args:
            images: uint8 images of the new domain; None: those observed since the alarm rose.
            name: Name of the domain; None: a number.
            background: Whether to return at once, with None; :meth:`wait` returns the result.

        Returns:
            Whether the guard accepted the stage, and if not, why.

        Raises:
            RatpError: If a stage is under way, or there is nothing to adapt to.
        """
        with self._mutex:
            if self.adapting:
                raise RatpError("a stage is under way: wait for it, with wait(), before the next one.")
            if not self.is_calibrated:
                raise RatpError(
                    "there are no source images, so the guard has nothing to compare with yet: observe "
                    f"{BASELINE - self.waiting} images first."
                )
            given = recent_images(self._observer) if images is None else images
            if given is None or len(given) < 2:
                raise RatpError("there is nothing to adapt to: no image is unlike the known domains so far.")
            check_images(given, self.image_size)
            number = 1 + len(self.history())
            domain = UnlabelledDomain(name or f"domain-{number}", given)
            self._stop.clear()
            if background:
                self._done = None
                self._worker = threading.Thread(
                    target=self._keep_result, args=(domain,), name="ratp-stage", daemon=True
                )
                self._worker.start()
                return None
        return self._stage(domain)

    def wait(self, timeout: float | None = None) -> Adaptation | None:
        """Waits for the stage in the background; returns its result, None if there is none yet."""
        if self._worker is not None:
            self._worker.join(timeout)
            if self._worker.is_alive():
                return None
        if isinstance(self._done, BaseException):
            done, self._done = self._done, None
            raise done
        return self._done

    def rollback(self, version: int | None = None) -> Version:
        """Lets an earlier version answer again.

        Args:
            version: Its number; None: the one before the current one.

        Returns:
            The version that answers now.
        """
        with self._mutex:
            earlier = [item.number for item in self.history() if item.number < self.version]
            if version is None and not earlier:
                raise RatpError(f"version {self.version} is the first: there is none before it.")
            chosen = max(earlier) if version is None else version
            self._store.read(chosen)  # before anything changes
            found = self._store.choose(chosen, "requested")
            self._use(chosen)
            return found

    def save(self) -> Version | None:
        """Makes what was adapted online since the last version a version; None if there is nothing, or it is refused.

        A refused model is dropped: the last version answers again.
        """
        with self._mutex:
            if self._online is None or self._online.is_unsure or not self._online.images:
                return None
            before = self.version
            self._save(self._online)
            return self._store.contents.version(self.version) if self.version != before else None

    def close(self) -> None:
        """Saves what was adapted online, and lets another process open the deployment.

        A stage in the background is stopped, and lost.
        """
        self._stop.set()
        if self._worker is not None:
            self._worker.join()
        with self._mutex:
            with suppress(RatpError):
                self.save()
            self._online = None
            self._store.close()

    def _use(self, number: int) -> None:
        """Makes a version answer in this process."""
        state, references = self._store.read(number)
        loaded = self._load()
        loaded.method.load_state(state)
        self._loaded, self._references, self._online = loaded, references, None
        self._model = Model(loaded.method, number)
        self._observer: Observer | Baseline = Baseline()
        if not references:
            return
        source, randomness = self._source(), randomness_of(loaded)
        known = {reference.name: self._store.images(reference.name)["images"] for reference in references}
        if self._settings.adapt == "online":
            self._online = Online(self._model, self._load().method, state, known, source.labels, randomness)
            self._references = self._online.references
        elif self._store.contents.version(number).online:  # its references are of a model that adapts
            self._references = [reference_of(self._model, name, images, loaded) for name, images in known.items()]
        every = 1 if self._online is None else RECOGNISED_EVERY
        self._source_gain = cache(lambda: gain(loaded.method, source.images[:WINDOW], randomness))
        self._observer = Observer(self._references, source.images, self._recognition, every)

    def _note_window(self, window: Window, causes: Sequence[str]) -> None:
        self._store.note("window", version=self.version, **asdict(window) | {"causes": list(causes)})

    def _calibrate(self) -> None:
        """Makes the first images what is usual, with the model's own answers in place of labels."""
        images = torch.cat(self._observer.recent)
        answers = self._model.logits(images).argmax(dim=1)
        self._store.keep_images(FIRST, images.cpu(), answers=answers)
        reference = reference_of(self._model, FIRST, images, self._loaded)
        why = f"calibrated on the first {len(images)} images"
        self._use(self._store.add(self._model.state(), [reference], why).number)

    def _observe_online(self, online: Online, images: Tensor, names: Sequence[str], *, again: bool) -> Observation:
        """Predicts images, and adapts to every window that is complete."""
        model = Model(self._model.method, self.version)  # the version may change
        answers, windows, events = list[Tensor](), list[tuple[Window, tuple[str, ...]]](), list[str]()
        while len(images):
            room = online.room
            part, names_of_part, images, names = images[:room], names[:room], images[room:], names[room:]
            is_whole = len(part) == WINDOW
            if not is_whole:
                answers.append(self._model.logits(part).softmax(dim=1))
            online.add(part, names_of_part)
            if len(part) == room:
                found, window, event = self._learn(online, *online.take(), again=again)
                answers += [found.probabilities] if is_whole else []
                windows.append(window)
                events += [event] if event else []
        answered = torch.cat(answers) if answers else torch.empty(0, len(self.classes))
        return replace(self._observation(model, answered, windows), events=tuple(events))

    def _learn(
        self, online: Online, images: Tensor, names: Sequence[str], *, again: bool
    ) -> tuple[Predictions, tuple[Window, tuple[str, ...]], str]:
        """Adapts to a window; returns what it predicted, what the alarm says, and what came of it."""
        if online.is_unsure:
            self._restore(online, ["adapting to a window was interrupted"])
        assert isinstance(self._observer, Observer)
        is_noise, reasons = self._observer.is_noise(images), list[str]()
        online.is_unsure = not is_noise
        try:
            found = self._model.predictions(images) if is_noise else self._model.learn(images)
        except AnswerError as error:
            reasons = [brief(error)]
            self._restore(online, reasons)
            found = self._model.predictions(images)
        window, causes = self._observer.observe(images, found, names)[0]
        if not again:
            self._note_window(window, causes)
        if is_noise or reasons:
            return found, (window, causes), "; ".join(reasons)
        event = ""
        if reasons := online.judge(found, window.level):
            event = self._restore(online, reasons)
        else:
            online.count(images, found)
            online.is_unsure = False
            if online.windows >= self._settings.save_every:
                event = self._save(online)
        return found, (window, causes), event

    def _restore(self, online: Online, reasons: Sequence[str]) -> str:
        """Brings the last version back, bit for bit; returns what to say of it."""
        self._model.load_state(self._store.read(self.version)[0])
        lost = online.images
        online.forget()
        self._store.note("restored", number=self.version, images=lost, reasons=list(reasons))
        return (
            f"version {self.version} answers again, {lost:,} images are forgotten: {'; '.join(reasons)}" if lost else ""
        )

    def _save(self, online: Online) -> str:
        """Makes the adapted model a version if the guard accepts it; returns what to say of it."""
        now, online.windows = self._model.state(), 0
        verdict = online.check(self._store.read(self.version)[0], now)
        if verdict is None or verdict.reasons:
            return self._restore(online, verdict.reasons if verdict else [LOST])
        why, about = f"adapted online to {online.images} images", {"images": online.images, "online": True}
        version = self._store.add(now, online.checked_references, why, verdict=verdict.to_json(), **about)
        self._model.version = version.number
        online.accept()
        self._references = self._observer.references = online.references
        return f"version {version.number}: {why}"

    def _observation(
        self, model: Model, probabilities: Tensor, windows: Sequence[tuple[Window, tuple[str, ...]]] = ()
    ) -> Observation:
        confidence, labels = probabilities.max(dim=1)
        return Observation(
            tuple(self.classes[k] for k in labels.tolist()),
            tuple(confidence.tolist()),
            model.version,
            self.level,
            tuple(window for window, _ in windows),
            tuple(name for _, causes in windows for name in causes),
            self.adapting,
        )

    def _recognition(self, images: Tensor, found: Predictions) -> float | None:
        return recognition(gain(self._model.method, images, randomness_of(self._loaded), found), self._source_gain())

    def _keep_result(self, domain: UnlabelledDomain) -> None:
        try:
            self._done = self._stage(domain)
        except BaseException as error:  # for wait(), in another thread
            self._done = error
            with self._mutex:
                self._observer.forget()  # or the next images would start the same stage again
            with suppress(RatpError):
                self._store.note("failed", domain=domain.name, why=brief(error))

    def _stage(self, domain: UnlabelledDomain) -> Adaptation | None:
        """Trains a copy of the model on a domain; None if it was stopped."""
        start = self._model
        method = copy_of(self._load, start, self.settings)
        domain, kept = split(domain, randomness_of(self._loaded).generator("deploy", domain.name))
        known = "its first images, by its own answers" if self._references[0].name == FIRST else "the source"
        watch = Watch(method, domain, self._source(), randomness_of(self._loaded), known)
        self._store.note("stage", domain=domain.name, images=len(domain), version=start.version)
        for _ in train(method.target_phases(domain)):
            if self._stop.is_set():
                return None
        verdict = watch.judge(method)
        if verdict is None or lost_weights(method.state()):
            raise TrainingError("values became NaN or infinite, so the stage is dropped. A smaller lr usually helps.")
        accepted = None
        if not verdict.reasons:
            names = [reference.name for reference in self._references]
            accepted = references_after(Model(method, self.version), self._store, names, kept, self._loaded)
        with self._mutex:
            if self._stop.is_set():
                return None
            if accepted is None or self._model is not start:
                reasons = verdict.reasons or ("another version was chosen meanwhile",)
                self._observer.forget()
                self._store.note("refused", domain=domain.name, reasons=list(reasons), version=self.version)
                return Adaptation(False, self.version, len(domain), reasons)
            why, about = f"adapted to {domain.name}", {"images": len(domain), "verdict": verdict.to_json()}
            self._use(self._store.add(method.state(), accepted, why, **about).number)
            return Adaptation(True, self.version, len(domain))

    def _source(self) -> LabelledDomain:
        name = self._references[0].name
        known = self._store.images(name)
        labels = known["labels"] if "labels" in known else known["answers"]
        return LabelledDomain(name, known["images"], labels, self.classes)
