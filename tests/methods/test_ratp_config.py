import pytest

from ratp.config import as_dict, override, switches
from ratp.methods.ratp import PAPER, RaTP, RaTPConfig

ROWS_THAT_CHANGE_BEHAVIOUR = {*range(1, 6), *range(7, 30), 39, 40}


def test_every_difference_between_paper_and_code_that_changes_behaviour_is_a_switch():
    rows = {s.doc_ref for s in switches(RaTPConfig()) if s.doc_ref is not None}
    assert rows >= ROWS_THAT_CHANGE_BEHAVIOUR


def test_the_paper_preset_names_existing_switches_with_valid_values():
    config = override(RaTPConfig(), PAPER)
    assert {name: as_dict(config)[name] for name in PAPER} == dict(PAPER)
    assert RaTP.presets["paper"] == PAPER


def test_the_paper_preset_says_nothing_twice():
    """Every value differs from the default, or is one the published code changes for a single stream."""
    default = as_dict(RaTPConfig())
    assert {name for name, value in PAPER.items() if default[name] == value} <= {"pca.old_weight"}


@pytest.mark.parametrize(
    ("name", "published", "paper"),
    [
        ("sgd.momentum", 0.0, 0.9),
        ("sgd.weight_decay", 5e-4, 5e-4),
        ("sgd.schedule", "inverse", "constant"),
        ("pca.similarity", "cosine", "dot"),
        ("pca.scale", 12.0, 12.0),
        ("pca.negatives", "positive", "all"),
        ("pca.old_weight", 1.0, 1.0),
        ("distill.weight", 0.5, 1.0),
        ("distill.on", "logits", "logits"),
        ("distill.data", "all", "target"),
        ("randmix.kernel_sizes", [5, 9, 13, 17], [5, 9, 13, 17]),
        ("randmix.colour_branch", True, False),
        ("randmix.tanh", True, False),
        ("randmix.adain", "residual", "affine"),
        ("randmix.redraw_adain", False, True),
        ("randmix.noise_per", "sample", "sample"),
        ("randmix.weights_per", "batch", "batch"),
        ("randmix.init", "uniform", "normal"),
        ("randmix.input_noise", 0.001, 0.0),
        ("r_con", 0.8, 0.8),
        ("strict", True, False),
        ("t2pl.r_top", 2, 2),
        ("t2pl.r_knn", 20, 20),
        ("t2pl.normalise", True, False),
        ("t2pl.rounds", 2, 1),
        ("t2pl.top_set", "concatenation", "union"),
        ("t2pl.classes", "predicted", "all"),
        ("memory.selection", "herding", "nearest"),
    ],
)
def test_values_are_those_of_code_and_paper(name, published, paper):
    assert as_dict(RaTPConfig())[name] == published
    assert as_dict(override(RaTPConfig(), PAPER))[name] == paper
