"""Steps as CUDA graphs: each runs exactly once, with the numbers of eager steps."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ratp.methods.ratp as ratp_module
from helpers import QUICK, accuracy_of, same_tensors, toy_method, toy_plan
from ratp.errors import RatpError
from ratp.functional.pseudo_labels import PseudoLabels
from ratp.methods import METHODS
from ratp.networks.network import NetworkConfig
from ratp.runs.run import Run
from ratp.training import cuda_graphs as capture_module
from ratp.training import phases as phases_module
from ratp.training.cuda_graphs import WARM_UP, CaptureWarning, bunches, recording_on, stepper
from ratp.training.phase import Phase, Tick, train
from read_back import ReadBack

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counting(Phase):
    """Steps that count themselves."""

    name = "counting"
    captures = True

    def __init__(self, epochs=2, steps=4, names=("a", "b")):
        self.epochs, self.steps, self.names = epochs, steps, names
        self.done = 0
        self.finished = False

    def begin_epoch(self, epoch):
        return {"epoch": float(epoch)}

    def step(self):
        self.done += 1
        return {name: torch.tensor(float(self.done * (k + 1))) for k, name in enumerate(self.names)}

    def finish(self):
        self.finished = True
        return {"done": float(self.done)}


class TestLoop:
    def test_one_tick_per_step_and_a_final_record(self):
        phase = Counting()
        *ticks, record = train([phase])
        assert [(t.epoch, t.step, t.epoch_done) for t in ticks] == [(e, s, s == 4) for e in (0, 1) for s in range(1, 5)]
        assert [t.statistics for t in ticks] == [{"epoch": 0.0}] * 4 + [{"epoch": 1.0}] * 4
        assert record == {"done": 8.0}

    def test_means_are_over_the_epoch_so_far(self):
        found = [
            {name: value.item() for name, value in t.means.items()} for t in train([Counting()]) if isinstance(t, Tick)
        ]
        a = [1.0, 1.5, 2.0, 2.5, 5.0, 5.5, 6.0, 6.5]
        assert found == [{"a": value, "b": 2 * value} for value in a]

    def test_means_stay_once_read(self):
        ticks = train([Counting()])
        first = next(ticks)
        assert first.means["a"].item() == 1
        next(ticks)
        assert first.means["a"].item() == 1

    def test_means_of_a_past_tick_are_refused(self):
        ticks = train([Counting()])
        first = next(ticks)
        next(ticks)
        with pytest.raises(RatpError, match="before the next step"):
            first.means  # noqa: B018

    def test_a_step_may_return_nothing(self):
        assert all(dict(t.means) == {} for t in train([Counting(names=())]) if isinstance(t, Tick))

    def test_changed_names_are_refused(self):
        phase = Counting()
        ticks = train([phase])
        next(ticks)
        phase.names = ("a", "c")
        with pytest.raises(RatpError, match="same names: a, b, then a, c"):
            next(ticks)

    @pytest.mark.parametrize(
        ("returned", "expected"),
        [
            ({"total": torch.ones(()), "x": 1.0}, r"one number each: 'x' is 1.0; write torch.tensor\(1.0\)"),
            ({"total": torch.ones(2, 3)}, r"'total' has the shape \(2, 3\)"),
            (None, "scalars by name.*got None"),
        ],
    )
    def test_non_scalars_are_refused(self, returned, expected):
        phase = Counting()
        phase.step = lambda: returned
        with pytest.raises(RatpError, match=expected):
            next(train([phase]))

    def test_numbers_of_several_types(self):
        phase = Counting(epochs=1, steps=2)
        phase.step = lambda: {"a": torch.tensor([1.0], dtype=torch.float64), "b": torch.tensor(2), "c": torch.ones(())}
        *_, last, _ = ((t.means if isinstance(t, Tick) else t) for t in train([phase]))
        assert {name: value.item() for name, value in last.items()} == {"a": 1, "b": 2, "c": 1}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it can be captured here")
    def test_falls_back_with_a_warning_without_device(self):
        phases = [Counting(), Counting()]
        with pytest.warns(CaptureWarning, match="without CUDA graphs: there is no CUDA device") as caught:
            moments = list(train(phases, capture=True))
        assert len(caught) == 2
        assert len(moments) == 18

    def test_a_phase_that_does_not_allow_it_is_not_captured(self, monkeypatch):
        device = FakeDevice(monkeypatch)
        phase = Counting()
        phase.captures = False
        list(train([phase], capture=True))
        assert device.graphs == []
        assert phase.done == 8

    def test_abandoned_phase_releases_its_graph(self, monkeypatch):
        device = FakeDevice(monkeypatch)
        ticks = train([Counting()], capture=True)
        for _ in range(5):
            next(ticks)
        ticks.close()
        assert [graph.log for graph in device.graphs] == [["begin", "end", "replay", "reset"]]


class FakeDevice:
    """As much of ``torch.cuda`` as capturing uses, keeping an account of it."""

    def __init__(self, monkeypatch):
        self.graphs, self.recording, self.log = [], False, []
        self.streams = [SimpleNamespace(name="usual", wait_stream=self._wait("usual"), synchronize=lambda: None)]
        self.default_generators = [FakeGenerator()]
        self.ends, self.free = True, 0.9
        for name in ("is_available", "current_device", "Stream", "device", "stream", "current_stream", "mem_get_info"):
            assert hasattr(torch.cuda, name)
        fake = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            default_generators=self.default_generators,
            Stream=lambda device: SimpleNamespace(
                name="aside", wait_stream=self._wait("aside"), synchronize=lambda: None
            ),
            device=self._device,
            stream=self._stream,
            current_stream=lambda: self.streams[-1],
            CUDAGraph=self._graph,
            mem_get_info=lambda: (self.free * 80e9, 80e9),
            synchronize=lambda: self.log.append("all is waited for"),
            empty_cache=lambda: self.log.append("memory is given back"),
        )
        monkeypatch.setattr(capture_module, "torch", SimpleNamespace(cuda=fake, device=torch.device))
        monkeypatch.setattr(capture_module, "_side_stream", fake.Stream)

    def _wait(self, name):
        return lambda other: self.log.append(f"{name} waits for {other.name}")

    @contextmanager
    def _device(self, device):
        yield

    @contextmanager
    def _stream(self, stream):
        before = list(self.streams)
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams[:] = before

    def _graph(self):
        graph = SimpleNamespace(log=[], registered=[])
        graph.register_generator_state = graph.registered.append
        graph.capture_begin = lambda capture_error_mode: self._begin(graph)
        graph.capture_end = lambda: self._end(graph)
        graph.replay = lambda: graph.log.append("replay") or self.log.append("replay")
        graph.reset = lambda: graph.log.append("reset")
        self.graphs.append(graph)
        return graph

    def _begin(self, graph):
        assert self.streams[-1].name == "aside"
        graph.log.append("begin")
        self.recording = True

    def _end(self, graph):
        self.recording = False
        if not self.ends:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nand more")
        graph.log.append("end")


class FakeGenerator:
    def __init__(self, state="fresh"):
        self.device, self.state = torch.device("cuda", 0), state

    def clone_state(self):
        return FakeGenerator(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state


class TestStepper:
    def test_every_step_runs_exactly_once(self, monkeypatch):
        device, source = FakeDevice(monkeypatch), FakeGenerator()
        calls = []
        with stepper(lambda: calls.append("recorded" if device.recording else "run"), [source, source]) as step:
            for _ in range(WARM_UP + 4):
                step()
        assert calls == ["run"] * WARM_UP + ["recorded"]
        (graph,) = device.graphs
        assert graph.log == ["begin", "end", "replay", "replay", "replay", "replay", "reset"]
        assert graph.registered == [source]
        assert [stream.name for stream in device.streams] == ["usual"]

    def test_several_steps_become_one_graph(self, monkeypatch):
        device, calls = FakeDevice(monkeypatch), []
        with stepper(lambda: calls.append("recorded" if device.recording else "run"), bunch=4) as step:
            assert [step(10) for _ in range(WARM_UP + 2)] == [1] * WARM_UP + [4, 4]
            assert step(3) == 1  # too few are left
            assert step(4) == 4
        assert calls == ["run"] * WARM_UP + ["recorded"] * 4 + ["run"]
        assert device.graphs[0].log == ["begin", "end", "replay", "replay", "replay", "reset"]

    @pytest.mark.parametrize(("steps", "bunch"), [(800, 10), (50, 10), (12, 6), (7, 7), (53, 1), (1, 1)])
    def test_an_epoch_consists_of_whole_graphs(self, steps, bunch):
        assert bunches(steps) == bunch

    def test_an_epoch_has_as_many_steps_as_it_should(self, monkeypatch):
        FakeDevice(monkeypatch)
        *ticks, _ = train([Counting(epochs=3, steps=8)], capture=True)
        calls = [1] * 8 + [8] * 2
        assert [tick.made for tick in ticks] == calls
        assert [tick.step for tick in ticks] == [*range(1, 9), 8, 8]
        assert [tick.epoch_done for tick in ticks] == [False] * 7 + [True] * 3

    def test_the_first_steps_keep_their_place_among_other_work(self, monkeypatch):
        device = FakeDevice(monkeypatch)
        with stepper(lambda: device.log.append(f"step on {device.streams[-1].name}")) as step:
            for _ in range(2):
                step()
        assert device.log == ["aside waits for usual", "step on aside", "usual waits for aside"] * 2

    @pytest.mark.parametrize(("beside_others", "free", "waits"), [(False, 0.9, 1), (True, 0.9, 0), (True, 0.1, 1)])
    def test_waits_for_others_only_when_memory_is_short(self, monkeypatch, beside_others, free, waits):
        device = FakeDevice(monkeypatch)
        device.free = free
        with recording_on("mine") if beside_others else nullcontext(), stepper(lambda: None) as step:
            for _ in range(WARM_UP + 2):
                step()
        emptied = ["all is waited for", "memory is given back"]
        assert [entry for entry in device.log if entry in emptied] == emptied * waits
        assert device.graphs[0].log == ["begin", "end", "replay", "replay", "reset"]

    @pytest.mark.parametrize("ends", [True, False])
    def test_uncapturable_step_is_run(self, monkeypatch, ends):
        device, source = FakeDevice(monkeypatch), FakeGenerator("drawn from")
        device.ends = ends
        calls = []

        def refusing():
            if device.recording:
                source.state = device.default_generators[0].state = "spoilt"
                raise RuntimeError("a value was read back\nwith a long story")
            calls.append(device.streams[-1].name)

        with stepper(refusing, [source]) as step:
            for _ in range(WARM_UP):
                step()
            with pytest.warns(CaptureWarning, match=r"without CUDA graphs: .*(read back|during capture)$") as caught:
                step()
            for _ in range(2):
                step()
        assert len(caught) == 1
        assert calls == ["aside"] * WARM_UP + ["usual"] * 3
        assert source.state == "drawn from"
        assert device.default_generators[0].state == "fresh"
        assert [stream.name for stream in device.streams] == ["usual"]

    def test_foreign_generators_would_be_captured_too(self, monkeypatch):
        """A replay would repeat the same numbers for ever."""
        device, calls = FakeDevice(monkeypatch), []
        with pytest.warns(CaptureWarning, match="without CUDA graphs: the steps draw from a generator on cpu"):
            step = stepper(lambda: calls.append(1), [FakeGenerator(), torch.Generator()]).__enter__()
        assert [step(5) for _ in range(WARM_UP + 2)] == calls == [1] * (WARM_UP + 2)
        assert device.graphs == []


class TestThreads:
    """Several threads, each with its own streams."""

    def test_a_thread_records_on_the_stream_it_was_given(self):
        seen, start = {}, threading.Barrier(3)

        def work(name):
            with recording_on(name):
                start.wait()
                seen[name] = capture_module._side_stream(torch.device("cuda"))
                with recording_on(f"{name} inside"):
                    seen[f"{name} inside"] = capture_module._side_stream(torch.device("cuda"))
                seen[f"{name} again"] = capture_module._side_stream(torch.device("cuda"))

        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two", "three")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {k: k.removesuffix(" again") for k in seen}
        assert len(seen) == 9

    def test_other_threads_share_one_stream(self, monkeypatch):
        monkeypatch.setattr(capture_module, "_common_stream", lambda device, use: f"the one of {device}")
        assert capture_module._side_stream(torch.device("cuda", 1)) == "the one of cuda:1"
        with recording_on("mine"):
            pass
        assert capture_module._side_stream(torch.device("cuda", 1)) == "the one of cuda:1"

    def test_captures_are_serialised(self, monkeypatch):
        """Replays go on meanwhile."""
        device = FakeDevice(monkeypatch)
        log, recording = [], threading.Event()

        def slow():
            if device.recording:
                recording.set()
                time.sleep(0.2)
                log.append("recorded")

        def other():
            recording.wait()
            captured()
            log.append("replayed")
            captured.close()
            log.append("closed")

        captured = capture_module._CapturedSteps(lambda: None, [], 1)
        for _ in range(WARM_UP + 1):
            captured()
        thread = threading.Thread(target=other)
        thread.start()
        with stepper(slow) as step:
            for _ in range(WARM_UP + 1):
                step()
        thread.join()
        assert log == ["replayed", "recorded", "closed"]


STATIC = [
    {},
    {"joint_batch": False, "distill.data": "target", "distill.student": "eval"},
    {"memory.replay": "separate", "augment_replay": False, "sgd.momentum": 0.9},
    {"source_transform.crop": True, "target_transform.flip": 0.5, "target_transform.hue": 0.3},
]


class TestObedience:
    """What a step that allows capturing must not do, looked for on the processor."""

    def test_read_back_is_detected(self):
        with ReadBack():
            for wrong in (
                lambda: torch.ones(()).item(),
                lambda: torch.ones(3)[torch.ones(3) > 0],
                lambda: torch.ones(3).nonzero(),
                lambda: torch.tensor([1.0]),
            ):
                with pytest.raises(AssertionError):
                    wrong()

    @pytest.mark.parametrize("changes", STATIC)
    def test_ratp(self, changes):
        method, source, targets = toy_method(toy_plan(changes=changes))
        for domain in (source, targets[0].unlabelled()):
            (phase,) = method.source_phases(domain) if domain is source else method.target_phases(domain)
            phase._static = True
            phase.begin()
            phase.begin_epoch(0)
            phase.step()
            with ReadBack():
                phase.step()
            assert method.network.training
            phase.finish()

    def test_source_only(self):
        method, source, _ = toy_method(toy_plan("source-only"))
        (phase,) = method.source_phases(source)
        assert phase.captures
        phase.begin()
        phase.begin_epoch(0)
        with ReadBack():
            phase.step()
        assert method.network.training


DEVICE = "cuda"
SIZES = {"epochs": 2, "steps": 10, "network.width": 0.25, "network.hidden": 32, "network.dim": 16, "batch": 16}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def on_gpu(method="ratp", backbone="dtn", **changes):
    plan = toy_plan(method, changes={**SIZES, **{n.replace("__", "."): v for n, v in changes.items()}})
    if backbone != "dtn":
        plan = replace(plan, recipe=replace(plan.recipe, network=NetworkConfig(backbone, hidden=32, dim=16)))
    return toy_method(replace(plan, device=torch.device(DEVICE)))


def drive(phases, capture, between=lambda: None):
    """Trains; gives the means of every epoch."""
    seen = []
    for moment in train(phases, capture=capture):
        if isinstance(moment, Tick):
            between()
            if moment.epoch_done:
                seen.append({name: value.item() for name, value in moment.means.items()})
    return seen


def target_phases(method, domain):
    """Phases of a method on a target; an oracle gets the labels."""
    if method.uses_target_labels(method.config):
        return method.labelled_target_phases(domain)
    return method.target_phases(domain.unlabelled())


def both(method="ratp", stages=2, between=None, **changes):
    """The state and the means after some stages, run by hand and captured."""
    ends = []
    for capture in (False, True):
        learner, source, targets = on_gpu(method, **changes)
        extra = (lambda calls=learner, source=source: between(calls, source)) if between else (lambda: None)
        means = drive(learner.source_phases(source), capture, extra)
        for target in targets[: stages - 1]:
            means += drive(target_phases(learner, target), capture, extra)
        ends.append(({name: tensor.clone() for name, tensor in learner.state().items()}, means))
    return ends


def assert_close(ends):
    (eager, means), (captured, other_means) = ends
    for name, tensor in eager.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(captured[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
    for there, here in zip(means, other_means, strict=True):
        assert here == pytest.approx(there, rel=1e-3, abs=1e-3)


@needs_gpu
class TestOnGPU:
    """Warnings are errors: a capture that failed would not pass for one."""

    @pytest.fixture(autouse=True)
    def _repeatable(self):
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield

    @pytest.mark.parametrize("stages", [1, 2, 3])
    def test_ratp(self, stages):
        assert_close(both(stages=stages))

    @pytest.mark.parametrize("changes", STATIC[1:])
    def test_ratp_with_other_switches(self, changes):
        assert_close(both(**{name.replace(".", "__"): value for name, value in changes.items()}, r_con=0.4))

    def test_ratp_with_a_residual_network(self):
        assert_close(both(backbone="resnet18", r_con=0.4, lr=0.001))

    @pytest.mark.parametrize("method", sorted(set(METHODS) - {"ratp"}))
    def test_every_other_method(self, method):
        """One source and one target stage; where a choice can fall either way, numbers may drift a little."""
        quick = {"lr": 0.001, **{name.replace(".", "__"): value for name, value in QUICK.get(method, {}).items()}}
        assert_close(both(method, **quick))

    @pytest.mark.parametrize("method", ["ratp", "arc"])
    def test_fused_losses_are_those_computed_one_by_one(self, method, monkeypatch):
        real, calls, ends = phases_module.fused_terms, [], []

        def fused(*arguments):
            calls.append(real(*arguments))
            return calls[-1]

        for function in (fused, lambda *arguments: {}):
            monkeypatch.setattr(phases_module, "fused_terms", real)
            learner, source, targets = on_gpu(method, r_con=0.3)
            drive(learner.source_phases(source), False)
            (phase,) = learner.target_phases(targets[0].unlabelled())
            phase.begin()
            phase.begin_epoch(0)
            monkeypatch.setattr(phases_module, "fused_terms", function)
            terms = phase.step()
            ends.append(({name: tensor.clone() for name, tensor in learner.network.state_dict().items()}, terms))
        (one, ours), (other, plain) = ends
        assert calls[0] and list(ours) == list(plain)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    def test_measuring_between_steps_changes_nothing(self):
        plain = both()
        probed = both(between=lambda method, source: method.predict(source.images))
        assert_close([plain[1], probed[1]])

    def test_new_labels_are_seen(self, monkeypatch):
        """Forces T2PL to find one class in the first epoch and another in the second."""

        def ends(second):
            calls = []

            def found(embedding, probabilities, config, mix):
                calls.append(len(calls))
                labels = torch.full((len(embedding),), second if len(calls) % 2 == 0 else 0, device=embedding.device)
                return PseudoLabels(labels, embedding[:4], embedding[:4], torch.ones(4, dtype=torch.bool))

            monkeypatch.setattr(ratp_module, "t2pl", found)
            return both(refresh=1, memory__replay="none", memory__labels="last")

        changed = ends(2)
        assert_close(changed)
        (_, same), (_, other) = ends(0)[1], changed[1]
        assert abs(same[-1]["ce"] - other[-1]["ce"]) > 0.1

    def test_the_rate_is_followed(self):
        assert_close(both(epochs=4, steps=5, lr=0.05))
        (slow, _), (fast, _) = (
            both(epochs=4, steps=5, lr=0.05)[1],
            both(epochs=4, steps=5, lr=0.05, sgd__schedule="constant")[1],
        )
        assert not same_tensors(slow, fast)

    def test_a_captured_phase_draws_on_from_its_generators(self):
        """After 20 steps, captured or not, the next numbers are the same."""
        following = []
        for capture in (False, True):
            method, source, _ = on_gpu()
            (phase,) = method.source_phases(source)
            drive([phase], capture)
            following.append([torch.rand(3, generator=g, device="cuda") for g in phase.generators])
        torch.testing.assert_close(*following, rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    def test_nothing_is_read_back(self):
        method, source, targets = on_gpu()
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0].unlabelled())
        phase.begin()
        phase.begin_epoch(0)
        phase.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            phase.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_step_that_reads_back_falls_back_to_eager(self, monkeypatch):
        phase_type = ratp_module.RaTPPhase
        real, ends = phase_type.step, []

        def reading(phase):
            record = real(phase)
            record["total"].item()
            return record

        monkeypatch.setattr(phase_type, "step", reading)
        for capture in (False, True):
            method, source, _ = on_gpu()
            phases = method.source_phases(source)
            if capture:
                with pytest.warns(CaptureWarning, match="without CUDA graphs") as caught:
                    means = drive(phases, capture)
                assert sum(issubclass(warning.category, CaptureWarning) for warning in caught) == 1
            else:
                means = drive(phases, capture)
            ends.append((method.state(), means))
        assert_close(ends)
        monkeypatch.setattr(phase_type, "step", real)
        assert_close(both(stages=1))  # and the next phase can be captured

    def test_graph_memory_is_released(self):
        method, source, _ = on_gpu()
        drive(method.source_phases(source), True)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(8):
            drive(method.source_phases(source), True)
            torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + 2**25

    def test_a_whole_run(self, tmp_path):
        plan = replace(toy_plan(changes=SIZES), device=torch.device("cuda"))
        Run(plan, tmp_path / "captured", probe=True).execute()
        Run(plan, tmp_path / "by hand", capture=False).execute()
        captured, by_hand = (accuracy_of(tmp_path / name) for name in ("captured", "by hand"))
        assert captured == [pytest.approx(row, abs=5) for row in by_hand]
