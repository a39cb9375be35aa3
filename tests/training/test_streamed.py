"""Images that are streamed to the device: the same batches, labels, exemplars and measurements as resident ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import ratp.training.device_cache as device_cache
import ratp.training.feed as feed_module
from helpers import TINY, files_of, ratp, same_tensors, tensors_of
from own_images import image_files, write_files
from ratp.data import domain as domain_module
from ratp.data.cache.decoded import open_decoded
from ratp.data.domain import LabelledDomain, selected
from ratp.data.streamed import StreamedImages
from ratp.errors import ConfigError, RatpError
from ratp.functional.numerics import drawn
from ratp.methods import METHODS
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.training.device_cache import with_images_on
from ratp.training.feed import Feed

CPU = torch.device("cpu")
IMAGES = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
OTHERS = [name for name in METHODS if name != "ratp"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for seed, name in enumerate(("ink", "mud", "fog")):
        write_files(folder / name, image_files(count=6, seed=seed))
    return folder


def plan_of(pictures, method="ratp", device="cpu", **changes):
    sizes = {**TINY, "network.backbone": "dtn", "size": 32, **changes}
    if method == "ratp":
        sizes["randmix.kernel_sizes"] = (3, 5)
    request = RunRequest(str(pictures), method, "ink>mud>fog", seed=1, changes=sizes, device=device, weights="none")
    return resolve(request)


class TestStandIn:
    @pytest.mark.parametrize("rows", [None, torch.arange(39, 0, -3)])
    def test_indexes_like_a_tensor(self, rows):
        plain = IMAGES if rows is None else IMAGES[rows]
        images = StreamedImages(IMAGES, CPU, rows)
        assert images.shape == plain.shape and len(images) == len(plain) and images.dtype == torch.uint8
        assert images.nbytes == plain.nbytes
        mask = torch.rand(len(plain)) < 0.5
        for index in (3, -1, slice(2, 9), slice(None), slice(1, 12, 3), mask, torch.tensor([5, 0, -1, 5]), [1, 2]):
            found = images[index]
            assert type(found) is torch.Tensor
            assert torch.equal(found, plain[index])
        assert torch.equal(torch.cat([images, IMAGES]), torch.cat([plain, IMAGES]))
        assert torch.equal(images.float().mean(), plain.float().mean())
        assert torch.equal(images[4, 1], plain[4, 1])
        assert images.to(CPU) is images
        assert images.device == CPU

    def test_parts_of_large_domains_are_stand_ins(self, monkeypatch):
        labels = torch.arange(40) % 2
        domain = LabelledDomain("ink", IMAGES, labels, ("a", "b"))
        small = domain.subset(labels == 1).subset(torch.arange(3))
        assert type(small.images) is torch.Tensor
        monkeypatch.setattr(domain_module, "LARGE", 100)
        large = domain.subset(labels == 1).subset(torch.arange(3))
        assert isinstance(large.images, StreamedImages)
        assert torch.equal(large.images[:], small.images)
        assert large.fingerprint() == small.fingerprint()
        assert isinstance(selected(large.images, torch.tensor([1])), StreamedImages)


class TestFeed:
    def batches(self, generator, count=30, images=None):
        """Batches, sometimes with a draw from elsewhere between them, sometimes of another size."""
        feed = None if images is None else Feed(images, generator)
        for k in range(count):
            draws = [(45, 8 if k % 7 else 4), *([(5, 2)] if k > 15 else [])]
            if feed is None:
                place = drawn(draws, 40, generator)
                found = IMAGES[place.clamp(max=39)]
            else:
                place, found = feed.take(draws, 40)
            yield place, found
            if k % 5 != 3:
                if feed is not None:
                    feed.skip((9, 3))
                drawn([(9, 3)], 0, generator)
            if k == 20:
                torch.rand(3, generator=generator)  # nobody told the feed

    def test_batches_are_those_of_the_generator(self):
        given, fed = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        plain = self.batches(given)
        for (place, images), (there, found) in zip(
            plain, self.batches(fed, images=StreamedImages(IMAGES, CPU)), strict=True
        ):
            assert torch.equal(place, there)
            assert torch.equal(images, found)
        assert torch.equal(given.get_state(), fed.get_state())

    def test_fetched_ahead_in_another_thread(self):
        threads = []

        class Watched(StreamedImages):
            def gathered(self, rows, out=None):
                threads.append(threading.current_thread())
                return super().gathered(rows, out)

        feed = Feed(Watched(IMAGES, CPU), torch.Generator().manual_seed(1))
        for _ in range(10):
            feed.take([(40, 4)], 40)
        assert threads.count(threading.current_thread()) == 1  # the first batch

    @pytest.mark.parametrize(("bunch", "memory"), [(1, True), (4, False), (4, True), (10, True)])
    def test_captured_steps_find_their_images_in_buffers(self, monkeypatch, bunch, memory):
        """Here a replay draws as the captured steps did, and reads the buffers; single steps come between."""
        prepare, buffers = [], []
        monkeypatch.setattr(feed_module, "before_replays", lambda fill: prepare.append(fill) if not prepare else None)
        generator = torch.Generator().manual_seed(1)
        feed = Feed(StreamedImages(IMAGES, CPU), generator)
        draws = [(45, 8)]

        def after():
            if memory:
                feed.skip((9, 3))
                drawn([(9, 3)], 0, generator)

        def single():
            place, images = feed.take(draws, 40)
            assert torch.equal(images, IMAGES[place.clamp(max=39)])
            after()

        def replay():
            prepare[0]()
            for buffer in buffers:
                place = drawn(draws, 40, generator)
                assert torch.equal(buffer, IMAGES[place.clamp(max=39)])
                if memory:
                    drawn([(9, 3)], 0, generator)

        for _ in range(3):
            single()
        state = generator.get_state()
        monkeypatch.setattr(feed_module, "_is_capturing", lambda device: True)
        for _ in range(bunch):
            buffers.append(feed.take(draws, 40)[1])
            after()
        monkeypatch.setattr(feed_module, "_is_capturing", lambda device: False)
        generator.set_state(state)  # a capture draws nothing
        for turn in range(4):
            for _ in range(3):
                replay()
            if turn == 1:
                torch.rand(2, generator=generator)  # nobody told the feed
            for _ in range(turn):
                single()

    def test_an_error_of_the_other_thread_is_raised_here(self):
        class Broken(StreamedImages):
            def gathered(self, rows, out=None):
                if threading.current_thread() is not threading.main_thread():
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried more.")
                return super().gathered(rows, out)

        feed = Feed(Broken(IMAGES, CPU), torch.Generator().manual_seed(1))
        feed.take([(40, 4)], 40)
        with pytest.raises(torch.OutOfMemoryError):
            feed.take([(40, 4)], 40)


class TestRuns:
    @pytest.mark.parametrize(
        "method", ["ratp", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "ratp")]
    )
    def test_same_results(self, pictures, tmp_path, method, monkeypatch):
        plan = plan_of(pictures, method)
        Run(plan, tmp_path / "resident", images="resident").execute()
        monkeypatch.setattr(domain_module, "LARGE", 100)
        Run(plan, tmp_path / "streamed", images="streamed").execute()
        for name in ("state", "weights"):
            assert same_tensors(tensors_of(tmp_path / "resident", name), tensors_of(tmp_path / "streamed", name))
        there, here = files_of(tmp_path / "streamed"), files_of(tmp_path / "resident")
        assert there.keys() == here.keys()
        for name in here:
            if name.startswith(("matrix", "config", "details", "examples", "predictions")):
                assert there[name] == here[name], name

    def test_a_stopped_run_continues_with_the_same_bits(self, pictures, tmp_path):
        plan = plan_of(pictures, "source-only", steps=6)
        Run(plan, tmp_path / "resident").execute()
        events = Run(plan, tmp_path / "streamed", images="streamed").events()
        for _ in range(6):
            next(events)
        events.close()
        Run(plan, tmp_path / "streamed", images="streamed").execute()
        assert same_tensors(tensors_of(tmp_path / "resident", "weights"), tensors_of(tmp_path / "streamed", "weights"))

    @pytest.mark.slow
    @needs_gpu
    @pytest.mark.parametrize("method", ["ratp", "shot", "tent", "arc", "shot++", "aucid", "pcl"])
    def test_same_results_on_a_gpu(self, pictures, tmp_path, method):
        """With captured steps, ten in a graph."""
        plan = plan_of(pictures, method, device="cuda", steps=40, epochs=3)
        for images in ("resident", "streamed"):
            Run(plan, tmp_path / images, images=images).execute()
        resident, streamed = (tensors_of(tmp_path / images, "weights") for images in ("resident", "streamed"))
        for name, tensor in resident.items():
            assert torch.allclose(tensor.float(), streamed[name].float(), rtol=1e-3, atol=1e-4), name


class TestPlacement:
    def test_images_that_do_not_fit_are_streamed(self, monkeypatch):
        domain = LabelledDomain("ink", IMAGES, torch.arange(40) % 2, ("a", "b"))
        gpu = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
        monkeypatch.setattr(device_cache, "shared_copy", lambda images, device: images.clone())
        for free, is_streamed in ((IMAGES.nbytes, True), (2 * IMAGES.nbytes, False)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10 * free))
            if is_streamed:
                with pytest.warns(device_cache.StreamedWarning, match="the images of ink take"):
                    found = with_images_on(domain, gpu)
            else:
                found = with_images_on(domain, gpu)
            assert isinstance(found.images, StreamedImages) == is_streamed
        assert isinstance(with_images_on(domain, gpu, "streamed").images, StreamedImages)
        assert not isinstance(with_images_on(domain, gpu, "resident").images, StreamedImages)
        assert with_images_on(domain, CPU) is domain

    def test_mistakes(self, pictures, tmp_path):
        with pytest.raises(ConfigError, match="Did you mean 'streamed'"):
            Run(plan_of(pictures), tmp_path / "run", images="stream")
        result = ratp("run", "demo", "--images", "strewn", "--out", tmp_path / "out")
        assert result.code == 2
        assert "unknown place for images 'strewn'" in result.err


class TestCache:
    """That disappears while its files are mapped."""

    @pytest.fixture
    def domain(self, pictures, tmp_path):
        return open_decoded(pictures / "ink", 32, cache=tmp_path / "cache")

    def mapped(self, place) -> Path:
        (path,) = place.rglob("*.images")
        return path

    def test_removed(self, domain, tmp_path):
        before = domain.images.clone()
        self.mapped(tmp_path).unlink()
        assert torch.equal(StreamedImages(domain.images, CPU)[:], before)

    def test_cut_off(self, domain, tmp_path):
        images = StreamedImages(domain.images, CPU)
        with self.mapped(tmp_path).open("r+b") as file:
            file.truncate(100)
        for index in (slice(0, 2), torch.tensor([1]), slice(None)):
            with pytest.raises(RatpError, match="was cut off while it was in use"):
                images[index]


def test_gpu_memory_that_runs_out_is_one_message(pictures, tmp_path, monkeypatch):
    def events(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB.")

    monkeypatch.setattr(Run, "events", events)
    sizes = ["--set", "size=32", "--set", "network.backbone=dtn", "--method", "source-only", "--device", "cpu"]
    result = ratp("run", pictures, "--order", "ink>mud>fog", *sizes, "--out", tmp_path / "out", "-q")
    assert result.code == 1
    assert "the memory of the GPU ran out (CUDA out of memory)" in result.err and "--images streamed" in result.err
    assert "Traceback" not in result.err
