"""What is particular to Mobius: the order of the groups, starts that differ inside a batch, streams, presets."""

from itertools import pairwise

import pytest
import torch
from families import FAMILIES, alone, assert_same, build, configure, place, random_tokens
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from hf_hybrid import HwHConfig, HwHForCausalLM, MobiusConfig, MobiusForCausalLM

REFUSED = (ValueError, StrictDataclassError)
# Variants in which sequences can start at several groups.
CYCLIC = [("mobius", name) for name, fields in FAMILIES["mobius"].variants.items() if "depth_order" not in fields]
every_cyclic = pytest.mark.parametrize("case", CYCLIC, ids="-".join)


def ordinary_fields(config, layers):
    """Fields of the ordinary decoder made of the layers `layers` of a Mobius configuration."""
    names = set(HwHConfig().to_dict()) - {"layer_types", "auto_map", "model_type", "transformers_version"}
    fields = {name: value for name, value in config.to_dict().items() if name in names}
    return {
        **fields,
        "num_hidden_layers": len(layers),
        "full_attention_heads": [config.full_attention_heads[layer] for layer in layers],
        "full_attention_rope": [config.full_attention_rope[layer] for layer in layers],
        "sliding_window_layers": [n for n, layer in enumerate(layers) if config.layer_sliding_window(layer)],
        "per_layer_config": {
            n: {"intermediate_size": config.per_layer_config[layer].intermediate_size} for n, layer in enumerate(layers)
        },
        "mlp_taper": None,
    }


def unrolled(model, layers, start=0):
    """An ordinary decoder with a layer for each application of one of the Mobius model's."""
    config = model.config
    ordinary = HwHForCausalLM(HwHConfig(**ordinary_fields(config, layers))).to(model.dtype).eval()
    weights = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.layers."):
            if config.stream_embeddings and name != "model.norm.weight":
                tensor = tensor.view(config.vocab_size, config.num_block_groups, config.hidden_size)[:, start]
            weights[name] = tensor
    for place_, layer in enumerate(layers):
        for name, tensor in model.model.layers[layer].state_dict().items():
            weights[f"model.layers.{place_}.{name}"] = tensor
    ordinary.load_state_dict(weights)
    return ordinary


def written_out_order(config, start):
    """Step k uses group (s + k) mod P; in a layer loop each layer comes `passes` times in a row."""
    size = config.num_hidden_layers // config.num_block_groups
    if config.depth_order == "layer_loop":
        return [layer for layer in range(config.num_hidden_layers) for _ in range(config.passes)]
    layers = []
    for step in range(config.passes * config.num_block_groups):
        group = (start + step) % config.num_block_groups
        layers += range(group * size, (group + 1) * size)
    return layers


@pytest.mark.parametrize("variant", FAMILIES["mobius"].variants)
def test_equals_the_ordinary_decoder_of_the_unrolled_stack(variant):
    model = build(("mobius", variant), input_injection=False, pass_norm=False).double()
    tokens, mask, places = place([random_tokens(n, seed=n) for n in (5, 9, 13)], 15, "left")
    starts = range(model.config.num_block_groups) if model.config.depth_order == "cyclic" else [0]
    outputs = []
    for start in starts:
        ordinary = unrolled(model, written_out_order(model.config, start), start)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, start_groups=start).logits
            expected = ordinary(tokens, attention_mask=mask).logits
        for row, index in enumerate(places):
            assert_same(logits[row, index], expected[row, index], tolerance=1e-10)
        outputs.append(logits)
    # The order matters: no two starts give the same.
    assert all((first - second).abs().max() > 0.1 for first, second in pairwise(outputs))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_block_groups": 1},
        {"num_block_groups": 3},
        {"num_block_groups": 3, "depth_order": "looped"},
        {"num_block_groups": 3, "depth_order": "layer_loop"},
        {"num_block_groups": 3, "depth_order": "sequential"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_one_pass_is_the_ordinary_decoder_to_the_bit(fields):
    heads = {"full_attention_heads": [[0, 3], [2, 5], [1, 4]]}
    model = build(("mobius", "headwise"), passes=1, start_group=0, **{**heads, **fields})
    ordinary = HwHForCausalLM(HwHConfig(**ordinary_fields(model.config, [0, 1, 2]))).eval()
    ordinary.load_state_dict(model.state_dict())
    tokens = random_tokens(2, 11)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, ordinary(tokens).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), ordinary.generate(tokens, **options))


def test_cyclic_from_the_first_group_is_looped_to_the_bit():
    cyclic, tokens = build(("mobius", "headwise"), start_group=0), random_tokens(2, 11)
    looped = build(("mobius", "headwise"), start_group=0, depth_order="looped")
    with torch.no_grad():
        assert torch.equal(cyclic(tokens).logits, looped(tokens).logits)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_norm_and_injection_stand_between_passes(start):
    fields = {"num_block_groups": 3, "passes": 3, "depth_order": "cyclic", "input_injection": True, "pass_norm": True}
    model, tokens = build(("mobius", "looped"), **fields), random_tokens(2, 7)
    with torch.no_grad():
        model.model.pass_norm.weight.normal_()
        found = model.model(tokens, start_groups=start).last_hidden_state
        plain = build(("mobius", "looped"), **{**fields, "passes": 1, "input_injection": False, "pass_norm": False})
        plain.load_state_dict(model.state_dict(), strict=False)
        # Each pass by the one-pass model, whose final norm is taken away.
        plain.model.norm = torch.nn.Identity()
        first = states = model.model.embed_tokens(tokens)
        for number in range(3):
            if number:
                scale = states.pow(2).mean(-1, keepdim=True).add(model.config.rms_norm_eps).rsqrt()
                states = states * scale * model.model.pass_norm.weight + first
            states = plain.model(inputs_embeds=states, start_groups=start).last_hidden_state
        assert_same(found, model.model.norm(states))


def starts_of(model, rows):
    return torch.arange(rows).mul(2).add(1) % model.config.num_block_groups


def from_start(model, tokens, start):
    with torch.no_grad():
        return model(tokens[None], start_groups=int(start), use_cache=False).logits[0]


@every_cyclic
@pytest.mark.parametrize("where", ["left", "right", "interior"])
def test_rows_of_one_batch_start_where_they_are_told(case, where):
    model = build(case)
    sequences = [random_tokens(n, seed=n) for n in (5, 9, 13, 7)]
    tokens, mask, places = place(sequences, 15, where)
    starts = starts_of(model, 4)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, start_groups=starts).logits
    for row, sequence in enumerate(sequences):
        assert_same(logits[row, places[row]], from_start(model, sequence, starts[row]))
    # A group of its own for each row is no other computation than one for all.
    with torch.no_grad():
        same = model(tokens, attention_mask=mask, start_groups=torch.full((4,), 1)).logits
        assert torch.equal(same, model(tokens, attention_mask=mask, start_groups=1).logits)


@every_cyclic
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_rows_with_different_starts_decode_together(case, kind):
    model = build(case)
    tokens, starts = random_tokens(4, 16), starts_of(model, 4)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
    with torch.no_grad():
        pieces = [model(part, cache=cache, start_groups=starts).logits for part in tokens.split([3, 1, 6, 5, 1], 1)]
    assert len(cache.layers) == model.config.passes * model.config.num_hidden_layers
    logits = torch.cat(pieces, dim=1)
    for row, start in enumerate(starts):
        assert_same(logits[row], from_start(model, tokens[row], start))


def test_a_lazily_made_cache_serves_mixed_starts():
    heads = [list(range(6))] * 3
    model = build(("mobius", "headwise"), full_attention_heads=heads)
    tokens, starts, cache = random_tokens(4, 9), starts_of(model, 4), DynamicCache()
    with torch.no_grad():
        pieces = [model(part, cache=cache, start_groups=starts).logits for part in tokens.split([4, 1, 4], 1)]
    for row, start in enumerate(starts):
        assert_same(torch.cat(pieces, 1)[row], from_start(model, tokens[row], start))


@every_cyclic
@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=["greedy", "beams", "several"]
)
def test_generation_from_different_starts(case, cache_implementation, options):
    model = build(case)
    sequences = [random_tokens(n, seed=n) for n in (5, 9, 12)]
    tokens, mask, _ = place(sequences, 13, "left")
    starts = starts_of(model, 3)
    arguments = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache_implementation, **options}
    batch = model.generate(tokens, attention_mask=mask, start_groups=starts, **arguments)[:, 13:]
    count = options.get("num_return_sequences", 1)
    for row, sequence in enumerate(sequences):
        single = model.generate(sequence[None], start_groups=int(starts[row]), **arguments)[:, len(sequence) :]
        assert torch.equal(batch[row * count : (row + 1) * count], single)


@every_cyclic
def test_recorded_outputs_of_different_starts(case):
    model = build(case, attn_implementation="eager")
    tokens, starts = random_tokens(3, 7), starts_of(model, 3)
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        batch = model(tokens, start_groups=starts, **options)
        singles = [
            model(row[None], start_groups=int(start), **options) for row, start in zip(tokens, starts, strict=True)
        ]
        as_tuple = model.model(tokens, start_groups=starts, use_cache=False, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], batch.hidden_states[-1])
    assert len(batch.hidden_states) == model.config.num_layer_applications + 1
    for row, single in enumerate(singles):
        for mine, other in zip(batch.hidden_states, single.hidden_states, strict=True):
            assert_same(mine[row], other[0])
        # Groups may have softmax heads of other numbers only where their caches agree, so the counts are the same.
        for mine, other in zip(batch.attentions, single.attentions, strict=True):
            assert_same(mine[row], other[0])


@every_cyclic
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients_of_different_starts_add_up(case, checkpointing):
    model = build(case).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    tokens, starts = random_tokens(4, 8), starts_of(model, 4)
    model(tokens, labels=tokens, start_groups=starts).loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row, start in zip(tokens, starts, strict=True):
        (model(row[None], labels=row[None], start_groups=int(start)).loss / 4).backward()
    for name, parameter in model.named_parameters():
        assert_same(together[name], parameter.grad, tolerance=1e-4)


def test_passes_may_change_when_a_model_is_loaded_and_later(tmp_path):
    case = ("mobius", "groups")
    model, tokens = build(case, passes=2), random_tokens(2, 9)
    model.save_pretrained(tmp_path)
    three = AutoModelForCausalLM.from_pretrained(tmp_path, passes=3).eval()
    assert three.config.passes == 3
    expected = unrolled(model, [0, 1, 2, 3] * 3)
    with torch.no_grad():
        assert_same(three(tokens).logits, expected(tokens).logits)
        model.config.passes = 3
        assert torch.equal(model(tokens).logits, three(tokens).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(three.generate(tokens, **options), expected.generate(tokens, **options))
    three.save_pretrained(tmp_path / "three")
    assert MobiusConfig.from_pretrained(tmp_path / "three").passes == 3
    with pytest.raises((ValueError, StrictDataclassError), match="passes is 0"):
        AutoModelForCausalLM.from_pretrained(tmp_path, passes=0)


def test_a_cache_of_other_passes_is_refused():
    model = build(("mobius", "headwise"))
    cache = DynamicCache(config=model.config)
    model.config.passes = 3
    with pytest.raises(ValueError, match="6 slots, but layers are applied 9 times"):
        model(random_tokens(1, 4), cache=cache)


def test_streams_have_embedding_and_head_of_their_own():
    """A stream's gradient stays in its own columns, and the block groups get one from every stream."""
    model, tokens = build(("mobius", "streams")), random_tokens(2, 7)
    model(tokens, labels=tokens, start_groups=1).loss.backward()
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        columns = weight.grad.view(97, 3, 40).abs().amax(dim=(0, 2))
        assert columns[1] > 0
        assert columns[0] == columns[2] == 0
    assert all(parameter.grad.any() for parameter in model.model.layers.parameters())


@pytest.mark.parametrize(
    ("size", "head_dim", "parameters"),
    # 50304 x 768 tied, 12 x (4 x 768 x 768 + the MLP), and 25 norms of 768 where norms have weights.
    [
        ("124m", 64, 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048) + 25 * 768),
        ("modded-gpt2", 128, 50304 * 768 + 12 * (4 * 768**2 + 2 * 768 * 3072)),
    ],
)
def test_presets(size, head_dim, parameters):
    with torch.device("meta"):
        model = MobiusForCausalLM(MobiusConfig.from_scratch(size))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert 123_500_000 < parameters < 123_600_000
    assert model.config.head_dim == head_dim
    assert [len(model.model.block_group(group)) for group in range(4)] == [3, 3, 3, 3]


def test_modded_gpt2_starts_as_the_identity():
    torch.manual_seed(0)
    small = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 31, "eos_token_id": None, "bos_token_id": None}
    model = MobiusForCausalLM(MobiusConfig.from_scratch("modded-gpt2", **small, num_hidden_layers=4, passes=2))
    tokens = torch.arange(9)[None]
    states = model.model(tokens, start_groups=2).last_hidden_state
    embedded = model.model.embed_tokens(tokens)
    torch.testing.assert_close(states, embedded * embedded.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert names == {"weight"}, "no biases"
    assert not any("norm" in name for name, _ in model.named_parameters())
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.down_proj.weight.normal_()
        expected = torch.nn.functional.relu(embedded @ mlp.up_proj.weight.T).square() @ mlp.down_proj.weight.T
        torch.testing.assert_close(mlp(embedded), expected)


def test_block_groups_are_the_layers():
    model = build(("mobius", "groups")).model
    groups = [list(model.block_group(group)) for group in range(2)]
    assert [layer for group in groups for layer in group] == list(model.layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_block_groups": 2}, "num_block_groups is 2, num_hidden_layers 3"),
        ({"num_block_groups": 0}, "num_block_groups is 0"),
        ({"passes": 0}, "passes is 0"),
        ({"depth_order": "spiral"}, "depth_order is 'spiral'"),
        ({"start_group": 3}, "start_group is 3: give 0 to 2"),
        ({"start_group": -1}, "start_group is -1"),
        ({"depth_order": "looped", "start_group": 1}, "depth_order 'looped' has one start"),
        ({"depth_order": "sequential", "start_group": 0}, "passes is 2, depth_order 'sequential'"),
        ({"depth_order": "looped", "start_group": 0, "stream_embeddings": True}, "stream_embeddings is True"),
        ({"depth_order": "layer_loop", "start_group": 0, "pass_norm": True}, "pass_norm is True"),
        ({"depth_order": "layer_loop", "start_group": 0, "input_injection": True}, "input_injection is True"),
        ({"full_attention_heads": [[0], [1], [2, 4]]}, "layer 2 cache hybrid of 2 key-value and 4 linear heads"),
        ({"sliding_window": 4, "sliding_window_layers": [1]}, "layer 1 cache hybrid_sliding"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_fields_are_refused_by_name(fields, message):
    with pytest.raises(REFUSED, match=message):
        configure(("mobius", "headwise"), **fields)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (3, "start_group is 3: give 0 to 2"),
        (torch.tensor([0, 3]), "start_group is 3"),
        (torch.tensor([0, 1, 2]), r"start_groups have shape \[3\], but the batch has 2 rows"),
        (torch.tensor([[0], [1]]), r"start_groups have shape \[2, 1\]"),
    ],
    ids=["number", "row", "too many", "two dimensions"],
)
def test_start_groups_are_refused_by_name(starts, message):
    with pytest.raises(ValueError, match=message):
        build(("mobius", "headwise"))(random_tokens(2, 5), start_groups=starts)


def test_the_default_start_is_the_configuration_s():
    model, tokens = build(("mobius", "headwise")), random_tokens(9)
    assert model.config.start_group == 1
    assert torch.equal(alone(model, tokens), from_start(model, tokens, 1))
