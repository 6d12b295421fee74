"""The last rule that matches a site decides, and says that it did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ttrace.errors import LayoutError
from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.rules import Rule, Rules


def decided(rules: Rules, text: str) -> str | None:
    rule = rules.decide(TensorId.parse(f"0/0/{text}").site)
    return None if rule is None else str(rule.layout)


def test_the_last_match_wins() -> None:
    rules = Rules.of({"*": "...", "layers.*.fc1": "seq hidden/tp", "layers.0.*": "seq hidden"})
    assert decided(rules, "norm/output") == "..."
    assert decided(rules, "layers.1.fc1/output") == "seq hidden/tp"
    assert decided(rules, "layers.0.fc1/output") == "seq hidden"


def test_a_star_matches_dots() -> None:
    rules = Rules.of({"layers.*.weight/param": "out/tp in"})
    assert decided(rules, "layers.3.mlp.fc1.weight/param") == "out/tp in"
    assert decided(rules, "layer.3.mlp.fc1.weight/param") is None


def test_a_pattern_without_a_kind_speaks_of_every_kind_and_slot() -> None:
    rules = Rules.of({"fc1": "seq hidden/tp"})
    for kind in Kind:
        assert decided(rules, f"fc1/{kind}") == "seq hidden/tp"
    assert decided(rules, "fc1/output.0") == "seq hidden/tp"


def test_a_pattern_with_a_kind_speaks_of_that_kind() -> None:
    rules = Rules.of({"fc1/output": "seq hidden/tp"})
    assert decided(rules, "fc1/output") == "seq hidden/tp"
    assert decided(rules, "fc1/input") is None


def test_a_pattern_without_a_slot_speaks_of_every_slot() -> None:
    rules = Rules.of({"fc1/output": "seq hidden/tp", "fc1/output.1": "seq hidden"})
    assert decided(rules, "fc1/output.0") == "seq hidden/tp"
    assert decided(rules, "fc1/output.1") == "seq hidden"


def test_gradients_follow_their_primal_without_pending_sums() -> None:
    """An output still to be summed has a gradient that is already whole."""
    rules = Rules.of({"fc2/output": "seq hidden +tp", "fc2/input.0": "seq hidden/tp"})
    assert decided(rules, "fc2/grad_output") == "seq hidden"
    assert decided(rules, "fc2/recompute_output") == "seq hidden"
    assert decided(rules, "fc2/grad_input.0") == "seq hidden/tp"


def test_everything_of_a_parameter_follows_the_parameter() -> None:
    rules = Rules.of({"fc1.weight/param": "out/tp in"})
    for kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD, Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM):
        assert decided(rules, f"fc1.weight/{kind}") == "out/tp in"
    assert decided(rules, "fc1.weight/optim.exp_avg") == "out/tp in"


def test_a_rule_of_its_own_outranks_the_primal() -> None:
    rules = Rules.of({"w/param_grad": "out in +dp", "w/param": "out/tp in"})
    assert decided(rules, "w/param_grad") == "out in +dp"


def test_a_site_that_no_rule_names_has_no_layout() -> None:
    assert Rules().decide(Site("fc1", Kind.OUTPUT)) is None
    assert Rules.of(None) == Rules()


def test_a_rule_says_where_it_was_stated() -> None:
    rules = Rules.of({"fc1": "seq hidden/tp"}, origin="rules.toml")
    rule = rules.decide(Site("fc1", Kind.GRAD_OUTPUT))
    assert str(rule) == 'rule "fc1" (rules.toml)'
    assert str(Rule("fc1", rules.rules[0].layout)) == 'rule "fc1"'


def test_the_rule_that_decided_for_a_primal_is_named_for_its_gradient() -> None:
    rule = Rules.of({"fc2/output": "seq hidden +tp"}, "mine").decide(Site("fc2", Kind.GRAD_OUTPUT))
    assert str(rule) == 'rule "fc2/output" (mine)'


def test_rules_are_checked_against_the_mesh() -> None:
    mesh = Mesh.parse("dp=2 tp=4 | edp=1 ep=8")
    Rules.of({"fc1": "seq/mb hidden/tp", "experts": "token/ep hidden"}).check(mesh)
    message = "rule \"fc1\": mesh 'dp=2 tp=4 | edp=1 ep=8' has no axis cp. Correct the name, or pass the job's axes"
    with pytest.raises(LayoutError, match=re.escape(message)):
        Rules.of({"fc1": "seq/cp hidden"}).check(mesh)
    with pytest.raises(LayoutError, match="axes ep, tp cannot be combined"):
        Rules.of({"fc1": "token/ep hidden/tp"}).check(mesh)


def test_a_single_rank_has_every_axis() -> None:
    Rules.of({"fc1": "seq/cp hidden/tp"}).check(Mesh())


def test_a_wrong_layout_is_refused_when_the_rule_is_made() -> None:
    with pytest.raises(LayoutError, match="names axis tp twice"):
        Rules.of({"fc1": "seq/tp hidden/tp"})


def test_rules_are_read_from_a_file_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[layouts]\n"*" = "..."\n"fc1/output" = "seq hidden/tp"\n')
    rules = Rules.of(path)
    assert rules == Rules.of({"*": "...", "fc1/output": "seq hidden/tp"}, origin="rules.toml")
    assert Rules.of(str(path)) == rules


@pytest.mark.parametrize("text", ["", "layouts = 3", "[layouts]\nfc1 = 3"])
def test_a_file_without_layouts_is_refused_with_an_example(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(LayoutError, match=re.escape(f"cannot read the rules file {path}: it has no table [layouts]")):
        Rules.of(path)


@pytest.mark.parametrize("text", [None, "[layouts"])
def test_a_file_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        LayoutError, match=re.escape(f"cannot read the rules file {path}: ") + r".*\[layouts\] with lines like"
    ):
        Rules.of(path)
