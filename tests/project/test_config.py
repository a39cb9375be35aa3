import math
from dataclasses import FrozenInstanceError, dataclass
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import toy_plan
from ratp.config import as_dict, decisive, override, switch, switches
from ratp.errors import ConfigError, RatpError, unknown
from ratp.methods.ratp import RaTPConfig
from ratp.training.recipe import Recipe


@dataclass(frozen=True)
class Inner:
    rate: float = switch(0.5, "a rate", doc_ref=7, above=0, below=1)
    sizes: tuple[int, ...] = switch((5, 9), "some sizes", minimum=1)


@dataclass(frozen=True)
class Config:
    flag: bool = switch(True, "a flag")
    count: int = switch(3, "a count", minimum=1)
    weight: float = switch(1.0, "a weight", minimum=0)
    name: str = switch("plain", "a name")
    mode: Literal["fast", "slow"] = switch("fast", "a mode", doc_ref=2)
    rounds: Literal[1, 2] = switch(2, "rounds")
    limit: int | None = switch(None, "a limit", minimum=0)
    inner: Inner = switch(Inner(), "a group")


KINDS = {
    "flag": bool,
    "count": int,
    "weight": float,
    "name": str,
    "mode": str,
    "rounds": int,
    "limit": int | None,
    "inner.rate": float,
    "inner.sizes": tuple,
}


def problems(config, changes):
    with pytest.raises(ConfigError) as caught:
        override(config, changes)
    return caught.value.problems


def value_of(config, name):
    return next(s.value for s in switches(config) if s.name == name)


class TestText:
    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("flag", "false", False),
            ("flag", " OFF ", False),
            ("flag", "No", False),
            ("flag", "0", False),
            ("flag", "true", True),
            ("flag", "On", True),
            ("flag", "YES", True),
            ("flag", "1", True),
            ("count", "17", 17),
            ("count", " 17 ", 17),
            ("weight", "0.25", 0.25),
            ("weight", "2", 2.0),
            ("weight", "1e-3", 0.001),
            ("name", " some thing ", "some thing"),
            ("mode", "slow", "slow"),
            ("mode", " slow ", "slow"),
            ("rounds", "1", 1),
            ("limit", "none", None),
            ("limit", "None", None),
            ("limit", "", None),
            ("limit", "4", 4),
            ("inner.rate", ".75", 0.75),
            ("inner.sizes", "3", (3,)),
            ("inner.sizes", "3,5,7", (3, 5, 7)),
            ("inner.sizes", "(3, 5)", (3, 5)),
            ("inner.sizes", "[3, 5]", (3, 5)),
        ],
    )
    def test_it_is_converted(self, name, text, value):
        changed = value_of(override(Config(), {name: text}), name)
        assert changed == value
        assert type(changed) is type(value)

    @pytest.mark.parametrize(
        ("name", "value", "expectation"),
        [
            ("flag", "maybe", "true or false"),
            ("flag", "", "true or false"),
            ("flag", 1, "true or false"),
            ("flag", None, "true or false"),
            ("count", "1.5", "a whole number"),
            ("count", "1e3", "a whole number"),
            ("count", "three", "a whole number"),
            ("count", "", "a whole number"),
            ("count", 1.5, "a whole number"),
            ("count", True, "a whole number"),
            ("count", None, "a whole number"),
            ("count", math.inf, "a whole number"),
            ("count", math.nan, "a whole number"),
            ("count", [3], "a whole number"),
            ("weight", "nan", "a number"),
            ("weight", "inf", "a number"),
            ("weight", "-inf", "a number"),
            ("weight", "1e999", "a number"),
            ("weight", math.nan, "a number"),
            ("weight", math.inf, "a number"),
            ("weight", True, "a number"),
            ("weight", 10**400, "a number"),
            ("weight", "1,5", "a number"),
            ("name", 3, "a text"),
            ("name", None, "a text"),
            ("limit", "2.5", "a whole number"),
            ("limit", False, "a whole number"),
            ("inner.sizes", "", "a whole number"),
            ("inner.sizes", "3,,5", "a whole number"),
            ("inner.sizes", "3,x", "a whole number"),
            ("inner.sizes", [], "a list"),
            ("inner.sizes", 5, "a list"),
            ("inner.sizes", None, "a list"),
            ("inner.sizes", [3, True], "a whole number"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_what_would(self, name, value, expectation):
        (problem,) = problems(Config(), {name: value})
        assert problem.startswith(name)
        assert expectation in problem
        assert "got" in problem

    @pytest.mark.parametrize("value", ["medium", 3, None, "fastslow"])
    def test_a_choice_outside_the_list_is_refused_with_the_list(self, value):
        (problem,) = problems(Config(), {"mode": value})
        assert "mode" in problem
        assert "fast, slow" in problem

    @pytest.mark.parametrize("value", [3, "3", 0, True, "true", 1.5])
    def test_a_numbered_choice_outside_the_list_is_refused(self, value):
        (problem,) = problems(Config(), {"rounds": value})
        assert "rounds" in problem

    @given(name=st.sampled_from(sorted(KINDS)), text=st.text())
    @example(name="count", text="9" * 400)
    @example(name="count", text="9" * 5000)
    @example(name="limit", text="-" + "9" * 400)
    @example(name="inner.sizes", text="1," + "9" * 400)
    @example(name="weight", text="1e400")
    @example(name="weight", text="1_0")
    @example(name="count", text="٣")
    @example(name="count", text="\x00")
    def test_any_text_is_converted_or_refused(self, name, text):
        try:
            changed = override(Config(), {name: text})
        except ConfigError:
            return
        value = value_of(changed, name)
        assert isinstance(value, KINDS[name])
        assert isinstance(value, bool) == (KINDS[name] is bool)

    @given(name=st.sampled_from([s.name for c in (RaTPConfig(), Recipe()) for s in switches(c)]), text=st.text())
    def test_any_text_is_converted_or_refused_for_every_switch(self, name, text):
        config = next(c for c in (RaTPConfig(), Recipe()) if name in as_dict(c))
        try:
            changed = override(config, {name: text})
        except ConfigError:
            return
        assert type(value_of(changed, name)) is type(value_of(config, name))

    @given(
        name=st.sampled_from(sorted(KINDS)),
        value=st.none() | st.booleans() | st.integers() | st.floats() | st.lists(st.integers() | st.floats()),
    )
    @example(name="count", value=10**400)
    @example(name="rounds", value=10**400)
    def test_any_plain_value_is_accepted_or_refused(self, name, value):
        try:
            changed = override(Config(), {name: value})
        except ConfigError:
            return
        assert isinstance(value_of(changed, name), KINDS[name])


class TestRanges:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("count", 0),
            ("count", "-5"),
            ("weight", -1e-9),
            ("inner.rate", 0),
            ("inner.rate", 1),
            ("inner.rate", "1.5"),
            ("inner.sizes", (5, 0)),
            ("inner.sizes", "0,5"),
            ("limit", -1),
        ],
    )
    def test_values_outside_are_refused_by_name(self, name, value):
        (problem,) = problems(Config(), {name: value})
        assert problem.startswith(f"{name} must be")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("count", 1), ("weight", 0), ("inner.rate", 0.001), ("inner.rate", 0.999), ("inner.sizes", [1]), ("limit", 0)],
    )
    def test_values_at_the_edge_are_accepted(self, name, value):
        assert value_of(override(Config(), {name: value}), name) == (tuple(value) if name == "inner.sizes" else value)


class TestMistakes:
    def test_all_are_reported_at_once(self):
        found = problems(
            Config(), {"flagg": "true", "count": "x", "inner.rate": 7, "mode": "fas", "weight": 2, "nothing.like.it": 1}
        )
        assert len(found) == 5
        message = str(ConfigError(found))
        for name in ("flagg", "count", "inner.rate", "mode", "nothing.like.it"):
            assert name in message
        assert "weight" not in "".join(p for p in found if "Valid" not in p)

    @pytest.mark.parametrize(
        ("wrong", "meant"),
        [("flagg", "flag"), ("Count", "count"), ("inner.rat", "inner.rate"), ("inner_rate", "inner.rate")],
    )
    def test_the_nearest_name_is_offered(self, wrong, meant):
        (problem,) = problems(Config(), {wrong: 1})
        assert f"Did you mean {meant!r}?" in problem

    def test_nothing_is_suggested_when_nothing_is_near(self):
        (problem,) = problems(Config(), {"zzzzzz": 1})
        assert "Did you mean" not in problem
        assert "inner.sizes" in problem

    def test_the_nearest_choice_is_offered(self):
        (problem,) = problems(Config(), {"mode": "slwo"})
        assert "Did you mean 'slow'?" in problem

    def test_a_group_cannot_be_set_as_a_whole(self):
        assert problems(Config(), {"inner": "5"})

    def test_a_leaf_has_no_leaves(self):
        assert problems(Config(), {"count.more": "5"})

    def test_it_is_an_error_of_the_package(self):
        with pytest.raises(RatpError):
            override(Config(), {"count": "x"})

    @given(st.text(), st.lists(st.text()))
    def test_any_name_has_a_sentence(self, given_name, valid):
        sentence = unknown("switch", given_name, valid)
        assert repr(given_name) in sentence


class TestOverride:
    def test_of_nothing_is_the_same(self):
        assert override(Config(), {}) == Config()

    def test_it_changes_only_what_is_named(self):
        changed = override(Config(), {"inner.rate": 0.25, "count": 9})
        expected = {**as_dict(Config()), "inner.rate": 0.25, "count": 9}
        assert as_dict(changed) == expected
        assert Config().inner.rate == 0.5

    def test_configurations_cannot_be_changed_in_place(self):
        with pytest.raises(FrozenInstanceError):
            Config().count = 5

    @given(
        st.fixed_dictionaries(
            {},
            optional={
                "flag": st.booleans(),
                "count": st.integers(1, 10**6),
                "weight": st.floats(0, 1e6),
                "name": st.text().map(str.strip),
                "mode": st.sampled_from(["fast", "slow"]),
                "rounds": st.sampled_from([1, 2]),
                "limit": st.none() | st.integers(0, 100),
                "inner.rate": st.floats(0, 1, exclude_min=True, exclude_max=True),
                "inner.sizes": st.lists(st.integers(1, 99), min_size=1),
            },
        )
    )
    def test_plain_data_leads_back_to_the_configuration(self, changes):
        config = override(Config(), changes)
        assert override(Config(), as_dict(config)) == config
        for name, value in changes.items():
            assert as_dict(config)[name] == value

    @pytest.mark.parametrize("config", [RaTPConfig(), Recipe()], ids=["ratp", "recipe"])
    def test_defaults_lead_back_to_themselves_as_data_and_as_text(self, config):
        plain = as_dict(config)
        assert override(type(config)(), plain) == config
        as_text = {n: ",".join(map(str, v)) if isinstance(v, list) else str(v) for n, v in plain.items()}
        assert override(type(config)(), as_text) == config


class TestSwitches:
    def test_leaves_come_in_order_with_all_that_is_known_of_them(self):
        found = list(switches(Config()))
        assert [s.name for s in found] == list(KINDS)
        rate = next(s for s in found if s.name == "inner.rate")
        assert (rate.value, rate.kind, rate.explanation, rate.doc_ref) == (0.5, "a number", "a rate", 7)

    def test_kinds_are_words(self):
        kinds = {s.name: s.kind for s in switches(Config())}
        assert kinds["flag"] == "true or false"
        assert kinds["mode"] == "one of fast, slow"
        assert kinds["limit"] == "a whole number or none"
        assert kinds["inner.sizes"].startswith("a list: a whole number")

    @pytest.mark.parametrize("config", [RaTPConfig(), Recipe()], ids=["ratp", "recipe"])
    def test_every_switch_explains_itself(self, config):
        assert all(s.explanation for s in switches(config))


class TestLaterSwitches:
    """Those that came after the first results."""

    @dataclass(frozen=True)
    class Grown:
        """A configuration with one."""

        rate: float = switch(0.1, "rate")
        warmth: float = switch(0.0, "how warm it begins", hash_default=False)

    def test_default_of_later_switch_is_not_recorded(self):
        assert as_dict(self.Grown()) == {"rate": 0.1, "warmth": 0.0}
        assert decisive(self.Grown()) == {"rate": 0.1}

    def test_changed_later_switch_is_recorded(self):
        assert decisive(override(self.Grown(), {"warmth": "0.5"})) == {"rate": 0.1, "warmth": 0.5}

    def test_a_run_is_called_as_before_unless_it_is_changed(self):
        plain, other = (toy_plan(changes=changes) for changes in ({}, {"network.bottleneck": "one"}))
        assert "network.bottleneck" not in plain.decisions()["recipe"]
        assert other.decisions()["recipe"]["network.bottleneck"] == "one"
        assert other.changed["network.bottleneck"] == "one"
        assert other.digest() != plain.digest()
