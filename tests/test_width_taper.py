"""Width schedules: the published table, exact sums and kept order for any sizes, and errors that name a way out."""

import re

import pytest
from families import build, configure, first_of_each_family
from huggingface_hub.errors import StrictDataclassError
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_hybrid.width_taper import SCHEDULES, tapered_widths


def test_cosine_table_of_the_paper():
    expected = [4608, 4544, 4368, 4080, 3712, 3296, 2848, 2432, 2064, 1776, 1600, 1536]
    assert tapered_widths(12, 3072, "cosine") == expected


@given(
    num_layers=st.integers(2, 40),
    units=st.integers(1, 300),
    schedule=st.sampled_from(SCHEDULES),
    start=st.integers(8, 15),
    end=st.integers(1, 8),
    multiple_of=st.sampled_from([1, 2, 16, 24]),
)
def test_sum_order_and_ends_are_exact(num_layers, units, schedule, start, end, multiple_of):
    size, start, end = units * multiple_of, start / 8, end / 8
    try:
        widths = tapered_widths(num_layers, size, schedule, start, end, multiple_of)
    except ValueError:
        assume(False)
    assert len(widths) == num_layers
    assert sum(widths) == num_layers * size
    assert min(widths) >= 1
    order = widths[::-1] if schedule == "reverse" else widths
    assert order == sorted(order, reverse=True)
    if schedule != "uniform":
        assert (order[0], order[-1]) == (start * size, end * size)
        assert all(width % multiple_of == 0 for width in widths)


@given(
    num_layers=st.integers(2, 40),
    size=st.integers(1, 700),
    start=st.integers(8, 16),
    end=st.integers(1, 8),
    multiple_of=st.integers(1, 48),
)
def test_what_an_error_names_works(num_layers, size, start, end, multiple_of):
    start, end = start / 8, end / 8
    try:
        tapered_widths(num_layers, size, "cosine", start, end, multiple_of)
    except ValueError as error:
        ways = re.findall(r"(intermediate_size|multiple_of)=(\d+)", str(error))
        assert ways or start + end != 2, error
        for field, value in ways:
            fields = {"intermediate_size": size, "multiple_of": multiple_of, field: int(value)}
            assert tapered_widths(num_layers, start=start, end=end, **fields)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_few_layers(num_layers):
    assert tapered_widths(num_layers, 64) == {1: [64], 2: [96, 32], 3: [96, 64, 32]}[num_layers]


def test_an_unequal_taper_is_shifted_to_the_mean():
    widths = tapered_widths(6, 80, "linear", start=1.8, end=0.8, multiple_of=8)
    assert (widths[0], widths[-1], sum(widths)) == (144, 64, 480)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"intermediate_size": 1000}, "start 1.5 of intermediate_size 1000 is 1500.*1024|992"),
        ({"start": 0.9}, "start is 0.9"),
        ({"end": 0.0}, "end is 0.0"),
        ({"schedule": "cosin"}, "schedule is 'cosin'"),
        ({"multiple_of": 0}, "multiple_of is 0"),
        ({"num_layers": 2, "end": 0.75}, "can't have that as their mean"),
    ],
)
def test_errors_name_field_and_value(fields, named):
    with pytest.raises(ValueError, match=named):
        tapered_widths(**{"num_layers": 4, "intermediate_size": 256, **fields})


@first_of_each_family
def test_every_family_takes_a_taper_at_the_same_cost(case, tmp_path):
    taper = {"mlp_taper": {"multiple_of": 4}, "per_layer_config": None}
    config = configure(case, **taper)
    assert [layer.intermediate_size for layer in config.per_layer_config] == [84, 56, 28]
    assert config.intermediate_size == 56
    config.save_pretrained(tmp_path)
    again = type(config).from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    tapered, uniform = build(case, **taper), build(case, mlp_taper=None, per_layer_config=None)
    assert tapered.num_parameters() == uniform.num_parameters()
    assert tapered.model.layers[2].mlp.up_proj.out_features == 28


@first_of_each_family
def test_a_taper_and_other_widths_are_refused(case):
    with pytest.raises((ValueError, StrictDataclassError), match=r"per_layer_config\[1\].*mlp_taper gives 56"):
        configure(case, mlp_taper={"multiple_of": 4}, per_layer_config={1: {"intermediate_size": 40}})
