"""The page and the picture of lengths."""

from xml.etree import ElementTree

import pytest

from trl.cli.length_charts import draw, page
from trl.data.lengths import profile_prompts


@pytest.fixture
def profile():
    return profile_prompts([[0] * (3 + 7 * i % 50) for i in range(90)], 4)


def test_a_page_needs_nothing_else_and_counts_every_row(profile):
    text = page(profile, "--max_length <9>")
    assert "http" not in text and "<script" not in text and "--max_length &lt;9&gt;" in text
    chart = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    bars = [bar[0].text for bar in chart.findall("rect")]
    assert sum(int(bar.split(": ")[1].split()[0]) for bar in bars) == 90
    assert bars[0].startswith("0 to ") and f"to {profile.histogram['edges'][-1] - 1} " in bars[-1]


def test_a_picture(profile, tmp_path):
    pytest.importorskip("matplotlib")
    draw(profile, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
