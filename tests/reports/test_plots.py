"""Figures: what they show, that they are the same every time and that they survive odd runs."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from ratp.errors import RatpError, RunDirectoryError
from ratp.reports.plots import accuracy_curves, matrix_heatmap, sample_sheet, unfamiliar_curves
from ratp.reports.style import encode, plain
from ratp.reports.summary import group_runs

GOLDEN = ((99.0, 60.0, 40.0), (95.0, 90.0, 50.0), (92.0, 85.0, 80.0))
PROBES = {"photo": [(0.0, 40.0), (0.3, 70.0), (1.0, 80.0)], "font": [(0.0, 50.0), (1.0, 50.0)]}


def words(axes):
    return [text.get_text() for text in axes.texts]


def make_images(n=3, size=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3, size, size), dtype=np.uint8)


def test_heat_map_has_a_panel_per_method_with_every_number(make_run):
    figure = matrix_heatmap(group_runs([make_run(), make_run(method="tent"), make_run(GOLDEN[:1], seed=1)]))
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 3
    assert {"99.0", "60.0", "40.0", "95.0", "90.0", "50.0", "92.0", "85.0", "80.0"} <= set(words(panels[0]))
    assert words(panels[2]).count("not yet trained") == 2
    assert "1 of 3 stages" in words(panels[2])


def test_curves_have_a_panel_per_domain_shaded_before_its_stage(golden):
    figure = accuracy_curves(group_runs([golden]))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["scan", "photo", "font"]
    assert list(figure.axes[1].lines[1].get_ydata()) == [60.0, 90.0, 85.0]
    assert ["before" in words(ax) for ax in figure.axes] == [False, True, True]
    assert ["after" in words(ax) for ax in figure.axes] == [True, True, False]


def test_unfamiliar_curves_carry_their_area(make_run):
    figure = unfamiliar_curves(group_runs([make_run(probes=PROBES), make_run(method="tent")]))
    assert figure is not None
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["photo", "font"]
    area = 0.3 * 55 + 0.7 * 75
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == [f"area {area:.1f}"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["ratp"]


def test_unfamiliar_curves_of_several_seeds_show_mean_and_band(make_run):
    other = {"photo": [(0.0, 60.0), (0.5, 80.0), (1.0, 80.0)]}
    figure = unfamiliar_curves(group_runs([make_run(probes=PROBES), make_run(seed=1, probes=other)]))
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [0.0, 0.3, 0.5, 1.0]
    assert line.get_ydata()[0] == 50.0
    assert len(figure.axes[0].collections) == 1


def test_without_probes_there_are_no_unfamiliar_curves(golden):
    assert unfamiliar_curves(group_runs([golden])) is None


def test_curves_of_different_orders_are_refused(make_run):
    groups = group_runs([make_run(), make_run(order=("photo", "scan", "font"))])
    with pytest.raises(RatpError, match="different streams or orders"):
        accuracy_curves(groups)
    assert len([ax for ax in matrix_heatmap(groups).axes if ax.images]) == 2


def test_sample_sheet_puts_originals_first_and_numbers_in_order(make_run):
    names = ["RandMix 10", "RandMix 2", "original"]
    run = make_run(samples={name: make_images() for name in names})
    figure = sample_sheet(run)
    assert figure is not None
    assert [ax.get_ylabel() for ax in figure.axes] == ["original", "RandMix 2", "RandMix 10"]
    shown = figure.axes[0].images[0].get_array()
    assert np.array_equal(shown[:, :16], make_images()[0].transpose(1, 2, 0))


def test_sample_sheet_of_a_run_without_samples_is_none(golden):
    assert sample_sheet(golden) is None


def test_sample_sheet_names_a_file_that_holds_no_images(make_run):
    with pytest.raises(RunDirectoryError, match="uint8 images"):
        sample_sheet(make_run(samples={"original": np.zeros((3, 8, 8), dtype=np.float32)}))


@pytest.mark.parametrize(
    "draw",
    [unfamiliar_curves, *(pytest.param(draw, marks=pytest.mark.slow) for draw in (matrix_heatmap, accuracy_curves))],
)
def test_figures_are_the_same_bytes_every_time(make_run, draw):
    groups = group_runs([make_run(probes=PROBES), make_run(seed=1, probes=PROBES)])
    for kind in ("svg", "png"):
        assert encode(draw(groups), kind) == encode(draw(groups), kind)


def test_figures_ignore_and_leave_alone_the_users_own_style(golden):
    groups = group_runs([golden])
    usual = encode(accuracy_curves(groups), "svg")
    with mpl.rc_context({"xtick.top": True, "lines.markeredgewidth": 4, "font.size": 20}):
        assert encode(accuracy_curves(groups), "svg") == usual
        assert mpl.rcParams["font.size"] == 20


def test_hostile_names_give_valid_files(hostile):
    groups = group_runs([hostile])
    for figure in (matrix_heatmap(groups), accuracy_curves(groups), unfamiliar_curves(groups)):
        assert figure is not None
        assert ET.fromstring(encode(figure, "svg")).tag.endswith("svg")
        assert Image.open(io.BytesIO(encode(figure, "png"))).format == "PNG"


@pytest.mark.parametrize("order", [("only",), ("s", "t"), ("x" * 80, "пример", "$"), tuple(f"d{i}" for i in range(9))])
@pytest.mark.parametrize("rows", [0, 1])
def test_runs_barely_begun_and_odd_orders_can_be_drawn(make_run, order, rows):
    groups = group_runs([make_run(((90.0,) * len(order),) * rows, order)])
    for figure in (matrix_heatmap(groups), accuracy_curves(groups)):
        ET.fromstring(encode(figure, "svg"))


def test_long_names_are_shortened_in_the_middle_and_dollars_are_no_mathematics():
    assert plain("a" * 20 + "b", 10, lines=1) == "aaaaaa…aab"
    assert plain("one two three", 8) == "one two\nthree"
    assert plain("$x$") == r"\$x\$"
