import base64
import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
from forks import DEADLINE, Program
from online_runs import PROMPTS, dataset, make_trainer
from workspace import environment

from trl.cli.report import main, page, read_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--virtual-time-budget=20000", "--dump-dom"),
)
# Runs before the page's own script, and uses the page as a person would.
VISITOR = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
const until = async (ready) => {
  for (let i = 0; i < 400 && !ready(); i += 1) await new Promise((go) => setTimeout(go, 20));
};
const cells = () => [...document.querySelectorAll("#rows tr")].map((row) =>
  [...row.cells].map((cell) => cell.textContent));
const found = () => document.getElementById("found").textContent;
const change = async (name, value) => {
  const field = document.querySelector(`#filters [name=${name}]`), before = found();
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  await until(() => found() !== before || name === "order");
  await new Promise((go) => setTimeout(go, 100));
};
addEventListener("load", async () => {
  const seen = { errors };
  await until(() => found());
  seen.all = found();
  document.getElementById("next").click();
  await until(() => found() !== seen.all);
  seen.second = found();
  seen.tokens = [...document.querySelectorAll("#rows tr")].map((row) =>
    [...row.cells[2].querySelectorAll("i")].map((token) =>
      [token.textContent, token.style.getPropertyValue("--rare"), token.title]));
  seen.red = getComputedStyle(document.querySelector("#rows i")).backgroundColor;
  await change("order", "best");
  seen.best = cells().map((row) => row.at(-2));
  await change("step", "1");
  seen.step = cells();
  await change("search", SEARCHED);
  seen.searched = cells();
  seen.marks = [...document.querySelectorAll("#rows mark")].map((mark) => mark.textContent);
  seen.light = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  seen.dark = getComputedStyle(document.body).backgroundColor;
  seen.curves = [...document.querySelectorAll("figure")].map((figure) => figure.dataset.metric);
  seen.differing = [...document.querySelectorAll("#settings th")].map((cell) => cell.textContent);
  document.body.replaceChildren(Object.assign(document.createElement("pre"), {
    id: "seen", textContent: btoa(unescape(encodeURIComponent(JSON.stringify(seen)))) }));
});
</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in their learning rate; the first wrote 64 completions."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate, steps in (("first", 0.1, 8), ("second", 0.2, 1)):
        changes = {"learning_rate": rate, "max_steps": steps, "log_memory": True}
        changes["log_token_logps"] = name == "first"
        data = dataset(PROMPTS * 4)
        make_trainer(folder / name, script=None, data=data, **changes).train()
    return folder


def records(folder):
    lines = (folder / "completions" / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_is_read(runs):
    run = read_run(runs / "first", most=1000)
    assert run["settings"]["trainer"] == '"RLOO"' and run["settings"]["learning_rate"] == "0.1"
    logs = [log for log in run["metrics"] if "loss" in log]
    assert [log["step"] for log in logs] == list(range(1, 9))
    assert all(log["seconds/generation"] > 0 for log in logs)
    assert run["completions"]["train"]["total"] == len(records(runs / "first")) == 64
    assert run["completions"]["eval"]["total"] == 0


def test_a_comparison_leaves_the_page_of_the_first_run(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    main([str(tmp_path / "first")])
    alone = (tmp_path / "first" / "report.html").read_text(encoding="utf-8")
    main([str(tmp_path / "first"), str(tmp_path / "second")])
    assert (tmp_path / "first" / "report.html").read_text(encoding="utf-8") == alone
    both = tmp_path / "first" / "report-and-second.html"
    assert "second" in both.read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{both}: \d+(\.\d)? kB", lines[1])


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_and_filters(runs, tmp_path):
    first = records(runs / "first")
    wanted = next(r["completion"] for r in first if r["step"] == 1 and r["completion"])
    main([str(runs / "first"), str(runs / "second"), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    visitor = VISITOR.replace("SEARCHED", json.dumps(wanted).replace("<", "\\u003c"))
    (tmp_path / "page.html").write_text(text.replace("<head>", "<head>" + visitor, 1), "utf-8")
    words = [CHROMIUM, *BROWSER, f"--user-data-dir={tmp_path / 'profile'}"]
    words.append((tmp_path / "page.html").as_uri())
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    (found,) = re.findall(r'<pre id="seen">([^<]*)</pre>', done.stdout)
    seen = json.loads(base64.b64decode(found))
    assert seen["errors"] == []
    assert seen["all"] == "64 of 64 · page 1 of 2" and "page 2 of 2" in seen["second"]
    best = [float(cell) for cell in seen["best"]]
    assert best == sorted(best, reverse=True)
    assert len(seen["step"]) == 8 and {row[0] for row in seen["step"]} == {"1"}
    assert wanted in [row[2] for row in seen["searched"]]
    assert seen["marks"] and {mark.lower() for mark in seen["marks"]} == {wanted.lower()}
    second = sorted(first, key=lambda record: -record["step"])[50:]
    for found, record in zip(seen["tokens"], second, strict=True):
        assert [text for text, *_ in found] == [text for text, _ in record["tokens"]]
        logps = [logp for _, logp in record["tokens"]]
        assert [int(rare) for _, rare, _ in found] == pytest.approx(
            [60 * min(1, -logp / math.log(100)) for logp in logps], abs=0.51
        )
        assert all(title.startswith("probability 0.") for *_, title in found)
    assert seen["red"].startswith(("rgb", "color")) and seen["red"] != "rgba(0, 0, 0, 0)"
    assert seen["light"] != seen["dark"]
    assert {"reward", "loss", "seconds/generation"} <= set(seen["curves"])
    assert "learning_rate" in seen["differing"] and "num_generations" not in seen["differing"]


def test_nothing_is_asked_of_other_hosts(runs):
    text = page([read_run(runs / "second", most=10)])
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").split('id="data"')[0]


def test_many_completions_stay_small(tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(3000)]
    with (tmp_path / "train.jsonl").open("w") as file:
        for i in range(10_500):
            text = " ".join(draw.choices(words, k=80))
            record = {"step": i // 64, "group": i // 8, "prompt": f"Say {i // 8}", "finish": "stop"}
            scores = {"rewards": {"r": i / 7}, "reward": i / 7, "advantage": 0.25}
            line = {"completion": text, "completion_ids": list(range(120))}
            file.write(json.dumps(record | scores | line) + "\n")
        file.write('{"step": 1, "prom')  # that the run is writing
    (tmp_path / "completions").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "completions" / "train.jsonl")
    run = read_run(tmp_path, most=10_000)
    assert run["completions"]["train"]["total"] == 10_500
    assert len(run["completions"]["train"]["pages"]) == 50
    assert len(page([run])) < 5e6


def test_texts_cannot_end_the_script(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"options": {"name": "</script><b>"}}))
    assert "</script><b>" not in page([read_run(tmp_path, most=1)])


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    changes = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, **changes).train()
    make_trainer(tmp_path, **changes).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [log["step"] for log in map(json.loads, lines) if "loss" in log]
    assert steps == [1, 2, 3]


def test_the_page_follows_a_run_until_it_is_interrupted(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 0.25}\n')
    words = ["-m", "trl", "report", str(tmp_path), "--watch", "0.1"]
    watching = Program(words, tmp_path, environment(tmp_path))

    def until_written(times):
        deadline = time.monotonic() + DEADLINE
        while watching.output.count("B\n") < times and time.monotonic() < deadline:
            assert watching.poll() is None, watching.errors
            time.sleep(0.05)
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    assert '"loss":0.25' in until_written(1)
    with metrics.open("a") as file:
        file.write('{"step": 2, "loss": 0.125}\n')
    assert '"loss":0.125' in until_written(2)
    os.killpg(watching.pid, signal.SIGINT)
    assert watching.wait().status == 130 and watching.errors == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [(["none"], "none has no run.json"), (["a", "b", "c"], "two to compare, not 3")],
)
def test_mistakes_are_told(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_secrets_of_runs_of_earlier_releases_are_not_shown(tmp_path):
    options = {"model_init_kwargs": {"token": "hf_hidden", "dtype": "auto"}, "eos_token": "end"}
    (tmp_path / "run.json").write_text(json.dumps({"options": options}))
    settings = read_run(tmp_path, most=1)["settings"]
    assert json.loads(settings["model_init_kwargs"]) == {"token": "<TOKEN>", "dtype": "auto"}
    assert settings["eos_token"] == '"end"'


def test_a_new_run_begins_new_metrics(tmp_path):
    old = [{"step": 0, "eval_reward": 5.0}, {"step": 1, "loss": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in old))
    make_trainer(tmp_path).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows and all(row["step"] == 1 and row.get("loss") != 5.0 for row in rows)


def strict(text):
    """Read JSON as browsers do, which know no NaN."""
    return json.loads(text, parse_constant=pytest.fail)


def unpacked(text):
    return strict(gzip.decompress(base64.b64decode(text)))


def test_a_browser_can_read_nan_and_lone_surrogates(tmp_path):
    """Those of reward functions, and those in files of earlier releases."""

    def reward(completions, log_extra, **kwargs):
        log_extra("score", [math.nan] * len(completions))
        log_extra("note", ["\ud83d"] * len(completions))
        return [1.0] * len(completions)

    make_trainer(tmp_path, reward=reward).train()
    (tmp_path / "run.json").write_text('{"options": {"bound": Infinity, "name": "\\ud83d"}}')
    text = page([read_run(tmp_path, most=10)])
    (data,) = re.findall(r'id="data">(.*?)</script>', text)
    (run,) = strict(data)["runs"]
    assert run["settings"]["bound"] == "null" and run["settings"]["name"] == '"\ufffd"'
    texts = unpacked(run["completions"]["train"]["pages"][0])
    assert {row["rewards"]["score"] for row in texts} == {None}
    assert {row["rewards"]["note"] for row in texts} == {"\ufffd"}
