"""The report: the pictures show the map's own numbers, the page stands alone and says what is missing and why."""

import base64
import io
import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from hf_hybrid.conversion.allocate import AllocationError, allocate
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.head_scores import gpband
from hf_hybrid.conversion.report import CLASS_COLORS, natural_classes, pictures, write_report

LAYERS, HEADS, GROUPS, PAIRS = 7, 6, 2, 16
STEMS = ["rpd_by_layer", "rfis_by_rpd", "gpband", "classes", "allocation"]


def make_map(**metadata):
    """RPD in three clusters; RFIS with a band at pair 11, short pairs for positional heads, long ones for others."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.tensor([0.08, 0.35, 0.62])[torch.randint(3, (LAYERS, HEADS), generator=generator)]
    rpd = (centres + 0.05 * torch.randn(LAYERS, HEADS, generator=generator)).clamp(0.001, 0.95)
    pair = torch.arange(PAIRS).float()
    band = (-((pair - 11) ** 2) / 2).exp() * (0.5 + torch.rand(LAYERS, HEADS, 1, generator=generator))
    edge = torch.where(pair < 8, rpd[..., None], torch.where(pair > 13, 1 - rpd[..., None], 0.0))
    noise = torch.rand(LAYERS, HEADS, PAIRS, generator=generator)
    facts = {
        "model": "a/model",
        "revision": "abc123",
        "model_type": "llama",
        "text_digest": "0" * 64,
        "settings": {"divergence": "js", "queries": 64},
        "granularity": "query_head",
        "folding": "mean",
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "training_length": 4096,
        "source": "hf_hybrid",
    }
    tensors = {
        "rpd": rpd,
        "rfis": 0.3 * band + 0.1 * edge * noise,
        "wavelengths": 2 * torch.pi * 1e5 ** (pair / PAIRS),
    }
    return HeadMap(tensors, {**facts, **metadata})


def duo_map():
    rpd = torch.rand(LAYERS, GROUPS, generator=torch.Generator().manual_seed(2))
    absent = {"revision": None, "model_type": None, "text_digest": None, "training_length": None, "settings": {}}
    metadata = {**make_map().metadata, **absent, "granularity": "kv_group", "source": "duo_attention"}
    return HeadMap({"rpd": rpd}, metadata)


class Page(HTMLParser):
    """Text, addresses and balance of an HTML page."""

    def __init__(self, path):
        super().__init__()
        self.text, self.images, self.links, self.open = "", [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "img":
            self.images.append(attributes["src"])
        elif tag == "a":
            self.links.append(attributes["href"])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def figures():
    head_map = make_map()
    allocation = allocate(head_map)
    return head_map, allocation, {picture.stem: picture for picture in pictures(head_map, allocation)}


@pytest.mark.parametrize("n", [3, 4, 9, 30])
def test_natural_classes_are_the_best_of_all_cuts(n):
    values = np.random.default_rng(n).random(n)
    ordered = np.sort(values)

    def spread(cuts):
        return sum(((part - part.mean()) ** 2).sum() for part in np.split(ordered, cuts))

    best = min(itertools.combinations(range(1, n), 2), key=spread)
    low, high = natural_classes(values.reshape(1, -1))
    assert np.searchsorted(ordered, [low, high]).tolist() == list(best)


def test_natural_classes_need_three_values():
    assert natural_classes(np.array([0.0, 0.5, 0.5, 0.0])) is None


def test_rpd_picture_shows_the_map(figures):
    head_map, _, drawn = figures
    axes = drawn["rpd_by_layer"].figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), head_map.rpd.T)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer", "query head")
    assert drawn["rpd_by_layer"].figure.axes[1].get_ylabel() == "RPD (bits)"


def test_rfis_picture_is_sorted_and_normalised(figures):
    head_map, allocation, drawn = figures
    curve, strip, image = drawn["rfis_by_rpd"].figure.axes[:3]
    order = head_map.rpd.flatten().argsort(stable=True)
    np.testing.assert_array_equal(curve.lines[0].get_xdata(), head_map.rpd.flatten()[order])
    rows = np.asarray(image.images[0].get_array())
    rfis = head_map.tensors["rfis"].flatten(0, 1)[order]
    np.testing.assert_allclose(rows, rfis / rfis.sum(1, keepdim=True), atol=1e-6)
    kept = np.asarray(strip.images[0].get_array())[:, 0]
    expected = [float(index % HEADS in allocation.full_attention_heads[index // HEADS]) for index in order.tolist()]
    assert kept.tolist() == expected
    # The training length's wavelength lies between the two pairs that enclose it.
    place = image.lines[0].get_xdata()[0]
    wavelengths = head_map.tensors["wavelengths"]
    assert wavelengths[int(place)] < 4096 < wavelengths[int(place) + 1]


def test_band_picture_shows_means_and_band(figures):
    head_map, _, drawn = figures
    axes = drawn["gpband"].figure.axes[0]
    shares = head_map.tensors["rfis"].double() / head_map.tensors["rfis"].double().sum(2, keepdim=True)
    band = gpband(shares, head_map.tensors["wavelengths"], 4096)
    assert axes.get_xscale() == "log"
    lines = {line.get_label(): line for line in axes.lines}
    mean = shares.flatten(0, 1).mean(0)
    np.testing.assert_allclose(lines["all heads"].get_ydata(), mean, atol=1e-9)
    # The classes' means, weighted by their sizes, are the mean of all heads.
    index = np.digitize(head_map.rpd.flatten(), natural_classes(head_map.rpd.numpy()))
    parts = [lines[f"{name} heads"].get_ydata() * (index == i).mean() for i, name in enumerate(CLASS_COLORS)]
    np.testing.assert_allclose(np.sum(parts, axis=0), mean, atol=1e-9)
    left, right = axes.patches[0].get_x(), axes.patches[0].get_x() + axes.patches[0].get_width()
    inside = [pair for pair, length in enumerate(head_map.tensors["wavelengths"].tolist()) if left < length < right]
    assert inside == list(range(band.first, band.last + 1)) and band.peak == 11
    assert f"pairs {band.first} to {band.last} of {PAIRS} (peak at 11)" in drawn["gpband"].caption
    assert any(np.all(np.asarray(line.get_xdata()) == 4096) for line in axes.lines)


def test_histogram_counts_every_head_once(figures):
    head_map, allocation, drawn = figures
    axes = drawn["classes"].figure.axes[0]
    assert sum(bar.get_height() for container in axes.containers for bar in container) == head_map.rpd.numel()
    stairs = next(patch for patch in axes.patches if patch.get_label() == "kept as full attention")
    assert stairs.get_data().values.sum() == sum(map(len, allocation.full_attention_heads))
    cut = axes.lines[0].get_xdata()[0]
    scores = torch.tensor(allocation.scores)
    assert (scores < cut).sum() == allocation.full_attention_units
    sizes = [int(size) for size in re.findall(r"(\d+) (?:retrieval|mid|positional)", drawn["classes"].caption)]
    assert sum(sizes) == head_map.rpd.numel() and min(sizes) > 0


def test_no_cut_is_drawn_where_there_is_none():
    head_map = make_map()
    other = make_map(revision="another")
    for allocation in (allocate(head_map, strategy="random"), allocate(other)):
        picture = next(p for p in pictures(head_map, allocation) if p.stem == "classes")
        assert not picture.figure.axes[0].lines and "Outlined" in picture.caption
    assert "made from another map" in list(pictures(head_map, allocate(other)))[-1].caption


def test_allocation_picture_shows_the_heads(figures):
    _, allocation, drawn = figures
    counts, grid = drawn["allocation"].figure.axes
    expected = [[float(head in heads) for heads in allocation.full_attention_heads] for head in range(HEADS)]
    assert np.asarray(grid.images[0].get_array()).tolist() == expected
    assert [bar.get_height() for bar in counts.patches] == [len(heads) for heads in allocation.full_attention_heads]
    assert "Strategy rpd: 4 of 14 KV groups (28.6%)" in drawn["allocation"].caption


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    head_map = make_map(model="a/<b>model")
    folder = tmp_path_factory.mktemp("reports") / "report"
    return head_map, folder, write_report(head_map, folder, allocate(head_map))


def test_page_stands_alone(report):
    head_map, folder, paths = report
    assert [path.name for path in paths] == [
        "index.html",
        *(f"{s}.{suffix}" for s in STEMS for suffix in ("png", "svg")),
    ]
    assert sorted(paths) == sorted(folder.iterdir())
    page = Page(paths[0])
    assert page.open == []
    assert page.links == [path.name for path in paths[1:]]
    prefix = "data:image/svg+xml;base64,"
    for source, stem in zip(page.images, STEMS, strict=True):
        assert source.startswith(prefix)
        svg = base64.b64decode(source.removeprefix(prefix))
        assert svg == (folder / f"{stem}.svg").read_bytes()
        ElementTree.fromstring(svg)
        pixels = imread(folder / f"{stem}.png")
        assert pixels.shape[1] == 1400 and pixels[..., :3].std() > 0.05
    for text in ("Head map of <b>model", head_map.digest(), "7 layers x 6 query heads", "4,096 tokens", "abc123"):
        assert text in page.text
    assert "Not on this page" not in page.text


def test_report_of_one_map_is_always_the_same(report, tmp_path):
    head_map, _, paths = report
    again = write_report(head_map, tmp_path, allocate(head_map))
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_page_of_an_imported_map_says_what_is_missing(tmp_path):
    paths = write_report(duo_map(), tmp_path)
    assert [path.stem for path in paths[1::2]] == ["rpd_by_layer", "classes"]
    page = Page(paths[0])
    assert "DuoAttention gives one score a head, not one a rotary pair; hf-hybrid analyze measures it" in page.text
    assert "The allocation: none was given" in page.text
    assert "1 - gate value" in page.text and "RPD" not in page.text
    assert "14 KV groups" in page.text and "None" not in page.text


def test_query_head_allocation_on_a_map_of_groups():
    allocation = allocate(make_map(), granularity="query_head", full_attention_share=0.5)
    picture = {p.stem: p for p in pictures(duo_map(), allocation)}["classes"]
    stairs = next(p for p in picture.figure.axes[0].patches if p.get_label() == "kept as full attention")
    # A group counts by the share of its query heads that are kept: half of 14 in all.
    assert stairs.get_data().values.sum() == pytest.approx(7)


@pytest.mark.parametrize(("divergence", "label"), [("js", "RPD (bits)"), ("kl", "RPD (nats)"), ("tv", "RPD")])
def test_labels_carry_the_unit(divergence, label):
    drawn = list(pictures(make_map(settings={"divergence": divergence}, training_length=None)))
    assert drawn[0].figure.axes[1].get_ylabel() == label
    assert drawn[3].figure.axes[0].get_xlabel() == label
    assert "does not know the training length" in drawn[2].caption


def test_layers_with_other_wavelengths_are_left_out_of_the_frequency_pictures():
    head_map = make_map(wavelength_layers=[1, 4, 6])
    drawn = {picture.stem: picture for picture in pictures(head_map, allocate(head_map))}
    kept = head_map.tensors["rfis"][[1, 4, 6]].flatten(0, 1).double()
    kept = kept / kept.sum(1, keepdim=True)
    assert drawn["rfis_by_rpd"].figure.axes[2].images[0].get_array().shape == kept.shape
    line = next(line for line in drawn["gpband"].figure.axes[0].lines if line.get_label() == "all heads")
    np.testing.assert_allclose(line.get_ydata(), kept.mean(0), atol=1e-9)
    assert all("Only the 3 of 7 layers" in drawn[stem].caption for stem in ("rfis_by_rpd", "gpband"))
    assert drawn["rpd_by_layer"].figure.axes[0].images[0].get_array().shape == (HEADS, LAYERS)


def test_flat_scores_are_drawn_without_classes():
    head_map = make_map()
    flat = HeadMap({**head_map.tensors, "rpd": torch.zeros(LAYERS, HEADS)}, head_map.metadata)
    drawn = {picture.stem: picture for picture in pictures(flat, allocate(flat))}
    assert "too few distinct values" in drawn["classes"].caption
    buffer = io.BytesIO()
    drawn["classes"].figure.savefig(buffer)
    assert buffer.getvalue()


def test_refuses_an_allocation_of_another_model(tmp_path):
    other = HeadMap({"rpd": torch.rand(LAYERS + 1, HEADS)}, make_map(model="another").metadata)
    with pytest.raises(AllocationError, match=r"has layers 8 \(another\), the head map has 7"):
        write_report(make_map(), tmp_path / "report", allocate(other))
    assert not (tmp_path / "report").exists()


def test_command(tmp_path):
    from hf_hybrid.cli.main import app

    head_map, out = HeadMap({"rpd": make_map().rpd}, make_map().metadata), tmp_path / "report"
    head_map.save(tmp_path / "map.safetensors")
    allocate(head_map).save(tmp_path / "heads.json")
    arguments = ["report", str(tmp_path / "map.safetensors"), "--out", str(out)]
    arguments += ["--heads", str(tmp_path / "heads.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert str(out / "index.html") in result.output and (out / "allocation.png").exists()
    before = (out / "index.html").read_bytes()
    refused = CliRunner().invoke(app, arguments[:-2])
    assert refused.exit_code == 1 and "--overwrite" in refused.output
    assert (out / "index.html").read_bytes() == before
    assert CliRunner().invoke(app, [*arguments[:-2], "--overwrite"]).exit_code == 0
    assert (out / "index.html").read_bytes() != before
