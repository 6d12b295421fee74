"""Ids read back as they were written, and refuse what could not be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrace.errors import TTraceError
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId, encode_name

names = st.from_regex(r"[A-Za-z0-9_.\-]+", fullmatch=True)


@given(
    step=st.integers(0, 10**9),
    microbatch=st.none() | st.integers(0, 10**6),
    name=names,
    kind=st.sampled_from(Kind),
    slot=st.just("") | names,
    call=st.integers(0, 99),
)
def test_an_id_reads_back_as_it_was_written(
    step: int, microbatch: int | None, name: str, kind: Kind, slot: str, call: int
) -> None:
    id_ = TensorId.of(step, microbatch, name, kind, slot=slot, call=call)
    assert TensorId.parse(str(id_)) == id_


@given(name=st.text(min_size=1), slot=st.text())
def test_any_text_is_a_name_and_a_slot_once_it_is_encoded(name: str, slot: str) -> None:
    id_ = TensorId.of(0, None, encode_name(name), Kind.OUTPUT, slot=encode_name(slot), call=3)
    assert TensorId.parse(str(id_)) == id_
    assert str(id_).encode().decode() == str(id_)


@given(st.text("/@% a2F0"), st.text("/@% a2F0"))
def test_no_two_texts_are_encoded_alike(a: str, b: str) -> None:
    assert (encode_name(a) == encode_name(b)) == (a == b)


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("layers.3.mlp.fc1", "layers.3.mlp.fc1"),
        ("a/b", "a%2Fb"),
        ("a@1", "a%401"),
        ("a b", "a%20b"),
        ("50%", "50%25"),
        ("a\tb\x00", "a%09b%00"),
        ("größe", "größe"),
        ("a\u2028b", "a%E2%80%A8b"),
    ],
)
def test_only_what_would_break_an_id_is_encoded(text: str, encoded: str) -> None:
    assert encode_name(text) == encoded


@pytest.mark.parametrize(
    "text",
    [
        "0/2/layers.3.mlp.fc1/output",
        "0/-/lm_head.weight/main_grad",
        "0/0/./loss",
        "1/0/block@2/input.kwargs.mask",
        "3/-/w/optim.exp_avg",
    ],
)
def test_the_written_form_is_kept(text: str) -> None:
    assert str(TensorId.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "0/2/fc1", "0/2/fc1/outputs", "x/2/fc1/output", "0/2/a b/output", "0//fc1/output", "²/2/fc1/output"]
)
def test_what_is_no_id_is_named_with_an_example(text: str) -> None:
    with pytest.raises(TTraceError, match=re.escape(f"{text!r} is not a tensor id. Write step/microbatch/")) as error:
        TensorId.parse(text)
    assert "for instance 0/2/layers.3.mlp.fc1/output" in str(error.value)


@pytest.mark.parametrize("text", ["{}/2/fc1/output", "0/{}/fc1/output", "0/2/fc1@{}/output"])
def test_a_number_of_thousands_of_digits_makes_no_id(text: str) -> None:
    with pytest.raises(TTraceError, match="is not a tensor id"):
        TensorId.parse(text.format("9" * 5000))


@pytest.mark.parametrize("name", ["", "a/b", "a@1", "a b"])
def test_a_name_that_could_not_be_read_back_is_refused(name: str) -> None:
    with pytest.raises(TTraceError, match=re.escape(f"{name!r}/output")) as error:
        Site(name, Kind.OUTPUT)
    assert f"the name of the model itself is {ROOT!r}" in str(error.value)


def test_a_slot_that_could_not_be_read_back_is_refused() -> None:
    with pytest.raises(TTraceError, match="'a/b' is not a valid site"):
        Site("fc1", Kind.OUTPUT, "a/b")


def test_another_kind_keeps_name_step_microbatch_and_call() -> None:
    id_ = TensorId.parse("4/2/fc1@3/output.0")
    assert str(id_.at(Kind.GRAD_OUTPUT)) == "4/2/fc1@3/grad_output.0"
    assert str(id_.at(Kind.INPUT, "1")) == "4/2/fc1@3/input.1"
    assert (id_.name, id_.kind) == ("fc1", Kind.OUTPUT)


def test_gradients_and_everything_of_a_parameter_have_a_primal() -> None:
    assert Kind.GRAD_INPUT.primal is Kind.INPUT
    assert Kind.GRAD_OUTPUT.primal is Kind.OUTPUT
    assert Kind.RECOMPUTE_OUTPUT.primal is Kind.OUTPUT
    assert all(kind.primal is Kind.PARAM for kind in Kind if kind.is_of_param)
    assert Kind.LOSS.primal is Kind.LOSS
    assert all(kind.primal.primal is kind.primal for kind in Kind)


def test_backward_kinds_are_the_gradients_and_what_is_recomputed_for_them() -> None:
    assert {kind for kind in Kind if kind.is_backward} == {
        Kind.GRAD_INPUT,
        Kind.GRAD_OUTPUT,
        Kind.CALL_GRAD,
        Kind.PARAM_GRAD,
        Kind.MAIN_GRAD,
        Kind.RECOMPUTE_INPUT,
        Kind.RECOMPUTE_OUTPUT,
    }
    assert {kind for kind in Kind if kind.is_activation_grad} == {Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.CALL_GRAD}
