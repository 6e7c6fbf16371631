"""Padding, packing, chunks, caches and generation: all equal the plain run of each sequence alone."""

from contextlib import contextmanager

import pytest
import torch
from families import alone, assert_same, build, every_model, place, random_tokens
from transformers import DynamicCache, StaticCache

LENGTHS = [5, 9, 13]


@contextmanager
def refused_for_windows(model, has_inner_padding):
    """Stock caches keep places and not tokens, so a window cannot be counted over padding that stands in one."""
    if has_inner_padding and (
        model.config.has_sliding_attention or getattr(model.config, "has_windowed_stream", False)
    ):
        with pytest.raises(ValueError, match=r"padding between real tokens.*put the padding on the left"):
            yield
    else:
        yield


@every_model
@pytest.mark.parametrize("where", ["left", "right", "both", "interior"])
@pytest.mark.parametrize("batch", [1, 3])
def test_padding(case, where, batch):
    model = build(case)
    sequences = [random_tokens(n, seed=n) for n in LENGTHS[:batch]]
    tokens, mask, places = place(sequences, 15, where)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits
    for row, sequence in enumerate(sequences):
        assert_same(logits[row, places[row]], alone(model, sequence))


@every_model
def test_padding_in_bfloat16(case):
    model = build(case)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name:
                # Small enough that bfloat16's own rounding, which adds up over the passes of a looped family, stays
                # below the bound; a token too many moves logits by 5 %.
                parameter.mul_(0.5 / getattr(model.config, "passes", 1) ** 0.5)
    model = model.to(torch.bfloat16)
    sequence = random_tokens(9, seed=1)
    tokens, mask, places = place([sequence, random_tokens(12, seed=2)], 15, "interior")
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits
    expected = alone(model, sequence)
    assert_same(logits[0, places[0]], expected, tolerance=1e-2)


@every_model
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens", "both", "position_ids and mask"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents(case, given, attention):
    model = build(case, attn_implementation=attention)
    sequences = [random_tokens(n, seed=n) for n in LENGTHS]
    row = torch.cat(sequences)[None]
    arguments = {}
    if given != "cu_seq_lens":
        arguments["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    if given in ("cu_seq_lens", "both"):
        arguments["cu_seq_lens_q"] = torch.tensor([0, 5, 14, 27], dtype=torch.int32)
    if given == "position_ids and mask":
        # Two rows, the second one with padding between and inside its documents.
        places = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:27].sort().values
        tokens, mask, positions = (
            random_tokens(2, 40, seed=9),
            torch.zeros(2, 40, dtype=torch.long),
            torch.zeros(2, 40).long(),
        )
        tokens[0, :27], mask[0, :27], positions[0, :27] = row[0], 1, arguments["position_ids"][0]
        tokens[1, places], mask[1, places], positions[1, places] = row[0], 1, arguments["position_ids"][0]
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        rows = [logits[0, :27], logits[1, places]]
    else:
        with torch.no_grad():
            rows = [model(row, **arguments).logits[0]]
    for logits in rows:
        for part, sequence in zip(logits.split(LENGTHS), sequences, strict=True):
            assert_same(part, alone(model, sequence))


@every_model
def test_packed_documents_cannot_be_continued(case):
    model = build(case)
    row, positions = random_tokens(1, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert model(row, position_ids=positions, use_cache=True).cache is None
    with pytest.raises(ValueError, match="packed documents can't be continued"):
        model(row, position_ids=positions, cache=DynamicCache(config=model.config))


def make_cache(kind, model):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=40)


@every_model
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("chunks", [[1, 2, 3, 5, 7, 1, 1], [8, 1, 11], [19, 1]], ids=str)
def test_chunks_then_decode(case, kind, chunks):
    model = build(case)
    tokens = random_tokens(2, sum(chunks))
    cache = make_cache(kind, model)
    with torch.no_grad():
        pieces = [model(chunk, cache=cache).logits for chunk in tokens.split(chunks, dim=1)]
    expected = torch.stack([alone(model, row) for row in tokens])
    assert_same(torch.cat(pieces, dim=1), expected)


@every_model
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("where", ["left", "right", "interior"])
def test_padded_chunks_then_decode(case, kind, where):
    model = build(case)
    sequences = [random_tokens(n, seed=n) for n in LENGTHS]
    tokens, mask, places = place(sequences, 16, where)
    # Each row goes on after its padding, and its first chunks may hold padding only.
    tail = random_tokens(3, 4, seed=11)
    tokens, mask = torch.cat([tokens, tail], 1), torch.cat([mask, torch.ones(3, 4, dtype=torch.long)], 1)
    cache, pieces, start = make_cache(kind, model), [], 0
    with torch.no_grad(), refused_for_windows(model, where != "left"):
        for size in [1, 4, 2, 9, 1, 1, 2]:
            stop = start + size
            pieces.append(model(tokens[:, start:stop], attention_mask=mask[:, :stop], cache=cache).logits)
            start = stop
    if start < tokens.shape[1]:
        return
    logits = torch.cat(pieces, dim=1)
    for row, sequence in enumerate(sequences):
        index = torch.cat([places[row], torch.arange(16, 20)])
        assert_same(logits[row, index], alone(model, torch.cat([sequence, tail[row]])))


@every_model
def test_padding_content_never_reaches_the_cache(case):
    model = build(case)
    sequences = [random_tokens(n, seed=n) for n in LENGTHS]
    states = []
    for seed in (1, 2):
        tokens, mask, _ = place(sequences, 15, "right", seed=seed)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens, attention_mask=mask, cache=cache)
        states.append([layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")])
    for first, second in zip(*states, strict=True):
        if first is not None:
            assert torch.equal(first, second)


@every_model
@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"prefill_chunk_size": 4}],
    ids=["greedy", "beams", "several", "chunked"],
)
def test_generation_of_a_left_padded_batch(case, cache_implementation, options):
    model = build(case)
    sequences = [random_tokens(n, seed=n) for n in LENGTHS]
    tokens, mask, _ = place(sequences, 14, "left")
    arguments = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache_implementation, **options}
    batch = model.generate(tokens, attention_mask=mask, **arguments)[:, 14:]
    per_prompt = options.get("num_return_sequences", 1)
    for row, sequence in enumerate(sequences):
        single = model.generate(sequence[None], **arguments)[:, len(sequence) :]
        assert torch.equal(batch[row * per_prompt : (row + 1) * per_prompt], single)


@every_model
def test_greedy_generation_equals_full_forward_passes(case):
    model = build(case)
    tokens = random_tokens(2, 7)
    generated = model.generate(tokens, max_new_tokens=8, do_sample=False)
    for row in generated:
        assert torch.equal(alone(model, row)[6:-1].argmax(-1), row[7:])


@every_model
def test_sampling_repeats_with_its_seed(case):
    model, tokens, runs = build(case), random_tokens(2, 7), []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(model.generate(tokens, max_new_tokens=8, do_sample=True, num_return_sequences=3))
    assert runs[0].shape == (6, 15)
    assert torch.equal(*runs)


@every_model
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_twice_on_one_cache(case, kind):
    model = build(case)
    cache = make_cache(kind, model)
    tokens = random_tokens(1, 6)
    first = model.generate(tokens, cache=cache, max_new_tokens=4, do_sample=False)
    prompt = torch.cat([first, random_tokens(1, 3, seed=4)], dim=1)
    second = model.generate(prompt, cache=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(second, model.generate(prompt, max_new_tokens=4, do_sample=False))


@every_model
def test_assisted_decoding_is_refused(case):
    model = build(case)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(random_tokens(1, 6), max_new_tokens=4, prompt_lookup_num_tokens=2)


@every_model
def test_extra_options_of_the_forward_pass(case):
    model = build(case)
    tokens = random_tokens(2, 7)
    with torch.no_grad():
        plain = model(tokens).logits
        embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
        last = model(tokens, logits_to_keep=2).logits
        recorded = model(tokens, output_hidden_states=True)
    assert_same(embedded, plain)
    assert_same(last, plain[:, -2:])
    # A looped family applies its layers more than once.
    applications = getattr(model.config, "num_layer_applications", model.config.num_hidden_layers)
    assert [tuple(states.shape) for states in recorded.hidden_states] == [(2, 7, 40)] * (applications + 1)
    with pytest.raises(ValueError, match="one of the two"):
        model()
