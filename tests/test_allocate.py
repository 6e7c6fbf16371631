"""Allocation: every strategy against an independent count, budgets, bounds, the file, and the command."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hf_hybrid.conversion.allocate import (
    Allocation,
    AllocationError,
    allocate,
    cache_bytes_per_token,
    draw_heads,
)
from hf_hybrid.conversion.head_map import HeadMap


def make_map(layers, heads, groups, *, rpd=None, **metadata):
    if rpd is None:
        rpd = torch.rand(layers, heads, generator=torch.Generator().manual_seed(layers * heads))
    facts = {
        "model": "a/model",
        "revision": None,
        "model_type": "llama",
        "text_digest": None,
        "settings": {},
        "granularity": "query_head",
        "folding": "mean",
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "training_length": None,
        "source": "hf_hybrid",
    }
    return HeadMap({"rpd": rpd}, {**facts, **metadata})


def chosen_units(allocation):
    """{(layer, unit)}, checking that units are whole."""
    size = allocation.num_attention_heads // len(allocation.scores[0])
    units = {(layer, head // size) for layer, heads in enumerate(allocation.full_attention_heads) for head in heads}
    assert len(units) * size == sum(map(len, allocation.full_attention_heads))
    return units


def test_share_of_smollm2_is_23_of_90():
    allocation = allocate(make_map(30, 9, 3), full_attention_share=0.25)
    assert (allocation.full_attention_units, allocation.units) == (23, 90)
    assert len(chosen_units(allocation)) == 23


@pytest.mark.parametrize(
    ("layers", "groups", "share", "budget"),
    # 0.35 * 90 is 31.499999999999996 in floats, and 31.5 as it was typed.
    [(30, 3, 0.35, 32), (30, 3, 0.15, 14), (7, 2, 0.5, 7), (5, 3, 0.1, 2), (4, 2, 0.0, 0), (4, 2, 1.0, 8)],
)
def test_budget_rounds_half_up(layers, groups, share, budget):
    allocation = allocate(make_map(layers, groups * 2, groups), full_attention_share=share)
    assert len(chosen_units(allocation)) == allocation.full_attention_units == budget


@pytest.mark.parametrize("granularity", ["kv_group", "query_head"])
def test_rpd_and_inverted_take_the_two_ends(granularity):
    head_map = make_map(7, 6, 2)
    scores = head_map.rpd.double()
    if granularity == "kv_group":
        scores = torch.stack([scores[:, :3].mean(1), scores[:, 3:].mean(1)], dim=1)
    order = [(index // scores.shape[1], index % scores.shape[1]) for index in scores.flatten().argsort().tolist()]
    share = 5 / len(order)
    lowest = allocate(head_map, full_attention_share=share, granularity=granularity)
    assert chosen_units(lowest) == set(order[:5])
    highest = allocate(head_map, full_attention_share=share, granularity=granularity, strategy="inverted")
    assert chosen_units(highest) == set(order[-5:])
    torch.testing.assert_close(torch.tensor(lowest.scores).double(), scores, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("low", "high", "budget"), [(0, 1, 3), (1, 2, 5), (1, 3, 6), (2, 2, 6), (0, 3, 4)])
def test_bounds_give_the_best_sum_of_all_legal_choices(low, high, budget):
    layers, heads = 3, 3
    head_map = make_map(layers, heads, heads)
    allocation = allocate(
        head_map, full_attention_share=budget / 9, minimum_per_layer=low, maximum_per_layer=high, granularity="kv_group"
    )
    units = list(itertools.product(range(layers), range(heads)))

    def legal(choice):
        return all(low <= sum(layer == index for layer, _ in choice) <= high for index in range(layers))

    best = min(
        (choice for choice in itertools.combinations(units, budget) if legal(choice)),
        key=lambda choice: sum(head_map.rpd[unit].item() for unit in choice),
    )
    assert chosen_units(allocation) == set(best)


def test_random_follows_its_seed_only():
    head_map = make_map(8, 4, 4)
    draws = [allocate(head_map, strategy="random", seed=seed).full_attention_heads for seed in range(6)]
    assert draws[3] == allocate(head_map, strategy="random", seed=3).full_attention_heads
    other_scores = make_map(8, 4, 4, rpd=1 - head_map.rpd)
    assert draws[3] == allocate(other_scores, strategy="random", seed=3).full_attention_heads
    assert len({json.dumps(draw) for draw in draws}) == 6
    # Layers and heads are drawn alike: over many seeds each unit is taken in a quarter of the draws (sd 0.02).
    counts = torch.zeros(8, 4)
    for seed in range(400):
        for unit in chosen_units(allocate(head_map, strategy="random", seed=seed)):
            counts[unit] += 1
    assert (counts / 400 - 0.25).abs().max() < 0.1


@pytest.mark.parametrize(("layers", "groups", "share"), [(6, 4, 0.25), (30, 3, 0.25), (5, 4, 0.5)])
def test_uniform_gives_layers_equal_numbers(layers, groups, share):
    head_map = make_map(layers, 2 * groups, groups)
    allocation = allocate(head_map, full_attention_share=share, strategy="uniform")
    units = chosen_units(allocation)
    counts = [sum(layer == index for layer, _ in units) for index in range(layers)]
    budget = int(share * layers * groups + 0.5)
    assert sum(counts) == budget and max(counts) - min(counts) <= (1 if budget % layers else 0)
    for layer in range(layers):
        ranks = sorted(range(groups), key=lambda unit: allocation.scores[layer][unit])
        assert {unit for index, unit in units if index == layer} == set(ranks[: counts[layer]])


@pytest.mark.parametrize(
    ("layers", "share", "period", "full"),
    [
        (30, 0.25, None, 7),  # 23 groups: 7 whole layers of 3
        (28, 0.25, None, [3, 7, 11, 15, 19, 23, 27]),
        (30, 0.25, 4, [3, 7, 11, 15, 19, 23, 27]),
        (6, 1.0, None, [0, 1, 2, 3, 4, 5]),
        (6, 0.0, None, []),
        (6, 0.5, 1, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layerwise_takes_whole_layers(layers, share, period, full):
    allocation = allocate(make_map(layers, 9, 3), full_attention_share=share, strategy="layerwise", period=period)
    heads = allocation.full_attention_heads
    assert all(layer in ([], list(range(9))) for layer in heads)
    taken = [index for index, layer in enumerate(heads) if layer]
    assert (len(taken) if isinstance(full, int) else taken) == full
    if isinstance(full, int):
        gaps = {b - a for a, b in itertools.pairwise(taken)}
        assert max(gaps) - min(gaps) <= 1
    assert allocation.full_attention_units == 3 * len(taken)


def test_scores_of_another_tool():
    head_map = make_map(5, 4, 2, source="retrieval_head")
    by_scores = allocate(head_map, strategy="scores", full_attention_share=0.4)
    as_rpd = allocate(make_map(5, 4, 2, rpd=head_map.rpd), full_attention_share=0.4)
    assert by_scores.full_attention_heads == as_rpd.full_attention_heads
    with pytest.raises(AllocationError, match="'rpd' needs a map of RPD; the scores of retrieval_head"):
        allocate(head_map, strategy="rpd")
    with pytest.raises(AllocationError, match="this map holds RPD: use 'rpd'"):
        allocate(make_map(5, 4, 2), strategy="scores")


def test_ties_are_taken_in_order():
    head_map = make_map(4, 4, 2, rpd=torch.full((4, 4), 0.5))
    allocation = allocate(head_map, full_attention_share=3 / 8)
    assert allocation.full_attention_heads == [[0, 1, 2, 3], [0, 1], [], []]


def test_a_folded_map_gives_the_same_groups():
    head_map = make_map(6, 8, 2, folding="min")
    whole, folded = allocate(head_map), allocate(head_map.fold_to_groups())
    assert whole.full_attention_heads == folded.full_attention_heads
    assert whole.scores == head_map.rpd.unflatten(1, (2, 4)).amin(2).double().tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "best"}, "strategy is 'best', must be one of rpd"),
        ({"granularity": "head"}, "granularity is 'head'"),
        ({"full_attention_share": 1.5}, r"full_attention_share is 1.5, must be a number in 0 .. 1"),
        ({"full_attention_share": float("nan")}, "full_attention_share is nan"),
        ({"minimum_per_layer": 1}, "the budget is 3 of 12 units in 6 layers of 2.*minimum_per_layer 1"),
        ({"maximum_per_layer": 0}, "maximum_per_layer is 0: give at least 1"),
        ({"minimum_per_layer": -1}, "minimum_per_layer is -1: give 0 to 2"),
        ({"minimum_per_layer": 2, "maximum_per_layer": 1}, "maximum_per_layer is 1: give at least 2, the minimum"),
        ({"strategy": "uniform", "full_attention_share": 0.75, "maximum_per_layer": 1}, "'uniform' cannot spend"),
        ({"strategy": "layerwise", "minimum_per_layer": 1}, "no minimum or maximum per layer"),
        ({"strategy": "layerwise", "full_attention_share": 0.1}, "the budget is 1 units, but one whole layer has 2"),
        ({"strategy": "layerwise", "period": 7}, r"period is 7, must be in 1 .. 6"),
        ({"period": 4}, "only 'layerwise' does"),
    ],
)
def test_refuses_settings(settings, message):
    with pytest.raises(AllocationError, match=message):
        allocate(make_map(6, 4, 2), **settings)


def test_refuses_query_heads_of_a_group_map():
    with pytest.raises(AllocationError, match="needs a map per query head"):
        allocate(make_map(6, 4, 2).fold_to_groups(), granularity="query_head")


def test_file_round_trip(tmp_path):
    head_map = make_map(5, 6, 3)
    made = allocate(head_map, full_attention_share=0.3, minimum_per_layer=1)
    path = tmp_path / "heads.json"
    made.save(path)
    config = SimpleNamespace(num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=3)
    assert Allocation.load(path, config) == made
    content = json.loads(path.read_text())
    assert content["map_digest"] == head_map.digest() and content["model"] == "a/model"
    assert content["settings"]["full_attention_share"] == 0.3 and content["share"] == 5 / 15
    assert content["settings"]["strategy"] == "rpd"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "format is 'something', must be 'hf_hybrid.allocation'"),
        ({"version": 2}, "version 2; this program reads 1"),
        ({"scores": ...}, "lacks the field 'scores'"),
        ({"full_attention_heads": [[0], [1], "x"]}, "full_attention_heads must be one list of int per layer"),
        ({"full_attention_heads": [[0], [1], [1, 0]]}, r"layer 2 is \[1, 0\], must be ascending"),
        ({"full_attention_heads": [[0], [4], [1]]}, r"layer 1 is \[4\].*in 0 .. 3"),
        ({"full_attention_heads": [[0], [1]]}, "scores have 3 layers .* the 2 layers of full_attention_heads"),
        ({"scores": [[0.5] * 3] * 3}, "scores have 3 units a layer, must have num_attention_heads 4"),
        ({"scores": [[0.5, float("nan")]] * 3}, "scores hold nan, must be finite"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0, must be a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"settings": ["rpd"]}, r"settings is \['rpd'\], must be dict"),
        ({"settings": {"strategy": "rpd"}}, "settings lack 'full_attention_share'"),
        ({"model": None}, "model is None, must be str"),
    ],
)
def test_refuses_files(tmp_path, change, message):
    path = tmp_path / "heads.json"
    allocate(make_map(3, 4, 2)).save(path)
    content = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not ...}
    path.write_text(json.dumps(content))
    with pytest.raises(AllocationError, match=message):
        Allocation.load(path)


def test_refuses_a_file_that_is_not_json(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text("no")
    with pytest.raises(AllocationError, match="is not JSON"):
        Allocation.load(path)


@pytest.mark.parametrize(
    ("name", "value"), [("num_hidden_layers", 4), ("num_attention_heads", 8), ("num_key_value_heads", 4)]
)
def test_refuses_another_model(name, value):
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, name: value}
    allocation = allocate(make_map(3, 4, 2))
    with pytest.raises(AllocationError, match=f"is for {name} .*a/model.*, the model has {value}"):
        allocation.check_model(SimpleNamespace(**config))


def test_a_config_without_kv_heads_has_as_many_as_heads():
    allocate(make_map(3, 4, 4)).check_model(SimpleNamespace(num_hidden_layers=3, num_attention_heads=4))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_cache_of_groups_is_the_share_of_the_source(share):
    allocation = allocate(make_map(30, 9, 3), full_attention_share=share)
    source = 2 * 30 * 3 * 64 * 2
    cost = cache_bytes_per_token(allocation.full_attention_heads, 9, 3, 64, 2)
    assert cost * allocation.units == source * allocation.full_attention_units


def test_cache_of_query_heads_counts_each_needed_kv_head_once():
    # Groups of 3: heads 0, 1 share a KV head; 2 | 3 do not; an empty layer costs nothing.
    assert cache_bytes_per_token([[0, 1], [2, 3], []], 6, 2, 5, 4) == 2 * (1 + 2 + 0) * 5 * 4


def test_draw_heads():
    assert draw_heads([[0, 2], [], [1, 2, 3]], 4) == "0 #.#. 2\n1 .... 0\n2 .### 3"
    assert draw_heads([[0]] * 11, 1).splitlines()[9:] == [" 9 # 1", "10 # 1"]


def run(*arguments):
    from hf_hybrid.cli.main import app

    return CliRunner().invoke(app, ["allocate", *map(str, arguments)])


def test_command(tmp_path):
    map_path, out = tmp_path / "map.safetensors", tmp_path / "heads.json"
    head_map = make_map(30, 9, 3, head_dim=64)
    head_map.save(map_path)
    result = run(map_path, "--out", out, "--fa-share", 0.25)
    assert result.exit_code == 0, result.output
    allocation = Allocation.load(out)
    assert allocation == allocate(head_map)
    assert draw_heads(allocation.full_attention_heads, 9) in result.output
    assert "23 of 90 KV groups stay full attention" in result.output
    assert "23 of 90 KV heads, 25.6% of the source's (5,888 of 23,040 bytes in bfloat16)" in result.output

    before = out.read_bytes()
    refused = run(map_path, "--out", out, "--strategy", "inverted")
    assert refused.exit_code == 1 and "--overwrite" in refused.output
    assert out.read_bytes() == before
    assert run(map_path, "--out", out, "--strategy", "inverted", "--overwrite").exit_code == 0
    assert Allocation.load(out) == allocate(head_map, strategy="inverted")


def test_command_on_a_duo_attention_table(tmp_path):
    table, out = tmp_path / "full_attention_heads.tsv", tmp_path / "heads.json"
    table.write_text("0.9\t0.1\n0.2\t0.3\n")
    result = run(table, "--out", out, "--strategy", "scores", "--num-attention-heads", 4)
    assert result.exit_code == 0, result.output
    assert Allocation.load(out).full_attention_heads == [[0, 1], []]
    assert "1 of 4 KV heads, 25.0% of the source's" in result.output and "bytes" not in result.output
