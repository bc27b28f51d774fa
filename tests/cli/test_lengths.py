"""What `trl lengths` says is what a run does."""

import json
from xml.etree import ElementTree

import pytest
from datasets import Dataset
from sft_runs import config, make_trainer
from tiny import save_tiny, tiny_model, tiny_tokenizer
from workspace import write_inputs

from trl.cli.lengths import as_html, main, profile_rows, write_png
from trl.data.lengths import profile_prompts
from trl.memory.estimate import Estimate
from trl.memory.model_size import model_size
from trl.memory.settings import RunSettings
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    write(folder / "pairs.jsonl", [{"prompt": "a" * p, "completion": "b" * c} for p, c in SIZES])
    return folder


SIZES = [(3 + 5 * i % 17, 1 + 7 * i % 40) for i in range(30)] + [(70, 4), (2, 90)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def profiled(folder, capsys, data, *words):
    model = str(folder / "tiny-model")
    main(
        [
            "--model_name_or_path",
            model,
            "--dataset_name",
            str(data),
            "--use_cpu",
            "--bf16",
            "false",
            *words,
        ]
    )
    return capsys.readouterr().out


def test_one_screen_and_files(folder, capsys, tmp_path):
    words = ["--html", str(tmp_path / "a.html"), "--png", str(tmp_path / "a.png")]
    shown = profiled(folder, capsys, folder / "pairs.jsonl", *words)
    lines = shown.splitlines()
    assert lines[0].startswith("32 rows, ") and lines[0].count("row ") == 3
    assert [line.split()[:2] for line in lines if "rows cut" in line] == [["max_length", "rows"]]
    assert len(lines) <= 45 and max(map(len, lines)) <= 120
    assert lines[-1].startswith("Options to paste: --max_length ")
    assert (tmp_path / "a.html").stat().st_size and (tmp_path / "a.png").stat().st_size


def test_memory_is_that_of_the_plan(folder, capsys):
    found = json.loads(profiled(folder, capsys, folder / "pairs.jsonl", "--json"))
    for row in found["limits"]:
        rows = min(8, SFTConfig.piece_on_cpu // row["max_length"])  # of a piece
        passes = -(-8 // rows)
        sizes = (1, 0, row["max_length"], rows, passes, passes)
        run = RunSettings(*sizes, generates=False, on_cpu=True)
        peak = Estimate(model_size(tiny_model().config), run).peak
        assert row["memory MB"] == round(peak / 1e6) and row["fits"]
    assert found["largest_that_fits"] == 256  # the context


def test_prompts_of_groups(folder, capsys, tmp_path):
    data = write(tmp_path / "p.jsonl", [{"prompt": "a" * n} for n in (1, 5, 60)])
    words = ["--method", "rloo", "--json", "--num_generations", "4", "--max_completion_length", "9"]
    found = json.loads(profiled(folder, capsys, data, *words))
    sizes = [len(tiny_tokenizer()("a" * n)["input_ids"]) for n in (1, 5, 60)]
    assert found["tokens"] == sum(sizes) and found["longest"][0] == [2, max(sizes)]
    assert found["repeated"]["repeated share in the groups of a prompt"] == 0.75
    assert found["options"] == f"--max_prompt_length {max(sizes)}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_lengthx", "4"], "unknown option --max_lengthx (closest: --max_length"),
        (["--dataset_train_split", "no"], "the dataset has the splits train"),
    ],
)
def test_mistakes(folder, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        profiled(folder, capsys, folder / "pairs.jsonl", *words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def profile():
    return profile_prompts([[0] * (3 + 7 * i % 50) for i in range(90)], 4)


def test_a_page_needs_nothing_else_and_counts_every_row(profile):
    text = as_html(profile, "--max_length <9>")
    assert "http" not in text and "<script" not in text and "--max_length &lt;9&gt;" in text
    chart = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    bars = [bar[0].text for bar in chart.findall("rect")]
    assert sum(int(bar.split(": ")[1].split()[0]) for bar in bars) == 90
    assert bars[0].startswith("0 to ") and f"to {profile.histogram['edges'][-1] - 1} " in bars[-1]


def test_a_picture(profile, tmp_path):
    pytest.importorskip("matplotlib")
    write_png(profile, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


class Counting(SFTTrainer):
    """Notes tokens, trained tokens and documents of each micro-batch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []

    def compute_loss(self, model, inputs, **options):
        self.seen.append((inputs.num_tokens, int(inputs.loss_mask.sum()), len(inputs)))
        return super().compute_loss(model, inputs, **options)


@pytest.mark.parametrize("packing", [False, True])
def test_the_numbers_are_those_of_the_first_epoch_of_a_run(tmp_path, packing):
    rows = {"prompt": ["a" * p for p, _ in SIZES], "completion": ["b" * c for _, c in SIZES]}
    data = Dataset.from_dict(rows)
    options = {"max_length": 64, "packing": packing, "per_device_train_batch_size": 1}
    model = ModelConfig(save_tiny(tmp_path / "tiny"))
    found = profile_rows(data, model, config(tmp_path, **options), [64])
    epoch = {"max_steps": -1, "num_train_epochs": 1}
    trainer = make_trainer(tmp_path, data, kind=Counting, **options, **epoch)
    trainer.train()
    tokens, trained, documents = (sum(column) for column in zip(*trainer.seen, strict=True))
    limit = next(row for row in found.limits if row["max_length"] == 64)
    assert found.tokens - limit["tokens lost"] == tokens
    assert found.parts["trained"]["tokens"] - limit["trained lost"] == trained
    assert found.rows - limit["rows untrained"] == documents == 31
    assert (limit["rows cut"], limit["ends lost"]) == (2, 2)
    if packing:
        assert found.packing["packs"] == len(trainer.seen)
