"""What methods declare to need is true, and phrases that say what a user has find the methods that suit."""

import json

import pytest

from helpers import domains_of, each_method, ratp, toy_plan
from ratp.cli.choose import SITUATIONS, TARGET_LABELS, choose, needs_of, parse_situations, relative_costs
from ratp.errors import ConfigError
from ratp.methods import METHODS
from ratp.streams.stream import make_stream
from ratp.training.method import OnlineMethod
from ratp.training.source_cache import AdoptedSource


def chosen(*phrases):
    """The options of the methods that suit, by name."""
    return {one.name: one.options for one in choose(phrases) if not one.reasons}


def test_all_needs_of_the_phrases_are_declared_by_some_method():
    declared = {need for name in METHODS for need in needs_of(name)}
    assert {need for situation in SITUATIONS.values() for need in situation.without} | {TARGET_LABELS} <= declared


@pytest.mark.parametrize("method", each_method())
def test_declared_passes_statistics_and_labels_are_true(method):
    needs, kind = set(needs_of(method)), METHODS[method]
    config = toy_plan(method).config
    passes = {need for need in needs if "pass" in need}
    assert len(passes) == (method != "source-only")
    assert ("many passes over a target" not in passes) == (issubclass(kind, OnlineMethod) or method == "source-only")
    assert ("batch statistics" in needs) == (kind.evaluation_statistics(config) == "batch")
    assert (TARGET_LABELS in needs) == kind.uses_target_labels(config)


@pytest.mark.parametrize("method", each_method())
def test_a_method_declares_its_own_source_training_if_it_takes_no_trained_network(method):
    plan, trained = toy_plan(method), AdoptedSource({})
    stream = make_stream("toy", domains_of(plan), plan.seed)
    plan.build_method(stream, trained).source_phases(stream.source)
    assert trained.used == ("its own source training" not in needs_of(method))


def test_phrases_find_the_methods_that_suit():
    assert chosen("one pass", "own model").keys() >= {"source-only", "adabn", "tent", "t3a", "cotta"}
    assert not chosen("one pass", "own model").keys() & {"ratp", "shot", "pden", "adacon"}
    assert chosen("no source images", "single images")["tent"] == ("--memory 0", "--set eval_bn=running")
    assert "adabn" not in chosen("no BatchNorm")
    assert "tent" in chosen("no BatchNorm")
    assert "oracle" not in chosen("small GPU")
    assert "oracle" in chosen("target labels")
    assert "pden" not in chosen("small GPU").keys() | chosen("little time").keys()


def test_every_method_has_its_costs():
    assert all(costs.keys() == METHODS.keys() for costs in relative_costs().values())


def test_phrases_may_be_said_in_other_ways():
    assert parse_situations("Online,  small   gpu, single pass") == ["one pass", "small GPU"]
    with pytest.raises(ConfigError) as error:
        parse_situations("one pas, small gpu, telepathy")
    assert ["Did you mean 'one pass'" in text for text in error.value.problems] == [True, False]
    with pytest.raises(ConfigError, match="separated by commas: no source images"):
        parse_situations(", ")


def test_the_command_lists_suitable_methods_and_reasons_against_the_others():
    shown = ratp("methods", "--for", "one pass, no source images").out
    assert "needs many passes over a target" in shown
    found = json.loads(ratp("methods", "--for", "one pass", "--json").out)
    assert {row["name"] for row in found["suitable"] + found["unsuitable"]} == set(METHODS)
    assert all(phrase in ratp("methods", "--for", "help").out for phrase in SITUATIONS)
    assert ratp("methods", "--for", "one pas").code == 2
