"""From the options of a run to its plan."""

import json

import dpo_runs
import kto_runs
import pytest
import reward_runs
import sft_runs
import torch
from datasets import Dataset
from tensor_bytes import TensorBytes
from tiny import tiny_model
from transformers import OlmoConfig
from workspace import write_inputs

from trl.cli import memory_plan
from trl.cli.arguments import ScriptArguments
from trl.cli.launch import launch_options, split_arguments
from trl.cli.memory_plan import ASSUMED_PROMPT, main, make_parser
from trl.memory.estimate import Estimate
from trl.memory.model_size import model_size
from trl.memory.plan import render
from trl.memory.settings import RunSettings, Sharding
from trl.models.loading import load_config
from trl.trainer.model_config import ModelConfig

PIECES = {"slices": 4, "accumulation": 4}  # eight pairs, two at a time
LONG = {"prompt": 512, "completion": 2488, "reference": True, "micro_batch": 2}
LONG |= {"slices": 8, "accumulation": 8}  # a pair is longer than a piece is by default
ALONE = {"group_size": 1, "micro_batch": 8, "slices": 2, "accumulation": 2, "scores_policy": True}
BASE = {"num_generations": 4, "max_completion_length": 8, "use_cpu": "true", "bf16": "false"}
OPTIONS = BASE | {"output_dir": "out", "report_to": "none", "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def words(folder, **changes):
    options = {"model_name_or_path": folder / "tiny-model"} | OPTIONS | changes
    return [
        str(word) for name, value in options.items() for word in (f"--{name}", value) if word != ""
    ]


def planned(folder, method="rloo", processes=1, **changes):
    """The plan of a run, as the command makes it."""
    parser = make_parser(method)
    built = memory_plan.build_options(
        parser, parser.read(words(folder, **changes)).values, processes
    )
    return memory_plan.make_plan(built.script, built.training, built.model)


def test_options_become_numbers(folder):
    run = planned(folder, longest_prompt=100, optim="sgd", optim_args="momentum=0.9").run
    assert run == RunSettings(
        group_size=4,
        prompt=100,
        completion=8,
        micro_batch=8,
        slices=2,
        accumulation=2,
        optimizer="sgd",
        optimizer_args="momentum=0.9",
        reference=True,  # RLOO's default beta
        on_cpu=True,
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"beta": 0}, {"reference": False}),
        ({"reuse_sampling_logps": "false"}, {"scores_policy": True}),
        ({"steps_per_generation": 4}, {"slices": 4, "scores_policy": True}),
        ({"num_iterations": 2}, {"passes": 2, "scores_policy": True}),
        ({"shared_prefix": "false"}, {"shared_prefix": False}),
        ({"attn_implementation": "eager"}, {}),
        ({"logits_chunk_size": 0}, {"logits_chunk": 0}),
        ({"generation_max_rows": 3}, {"generation_rows": 3}),
        ({"generation_max_kv_gb": 0.5}, {"generation_kv_gb": 0.5}),
        ({"gradient_checkpointing": "false"}, {"gradient_checkpointing": False}),
        ({"bf16": "true"}, {"product_bytes": 2, "scores_policy": True}),
        ({"bf16": "true", "reuse_sampling_logps": "true"}, {"product_bytes": 2}),
        ({"bf16": "none"}, {"product_bytes": 2, "scores_policy": True}),
        ({"dtype": "bfloat16"}, {"weight_bytes": 2, "product_bytes": 2}),
        ({"dtype": "auto"}, {}),
        ({"model_init_kwargs": '{"dtype": "float16"}'}, {"weight_bytes": 2, "product_bytes": 2}),
        ({"load_in_8bit": "true"}, {"matrix_bytes": 1.0}),
        ({"load_in_4bit": "true"}, {"matrix_bytes": 0.5625}),
        ({"device_memory_gb": 80}, {"on_cpu": False}),
    ],
)
def test_each_option_counts(folder, changes, fields):
    if "bits" in str(changes):
        pytest.importorskip("bitsandbytes")
    assert planned(folder, **changes).run == planned(folder).run.replace(**fields)


def test_the_penalty_of_grpo_needs_no_score_of_the_policy(folder):
    assert not planned(folder, "grpo", beta=0.1, reuse_sampling_logps="false").run.scores_policy


def test_processes_share_a_round(folder):
    run = planned(folder, processes=4).run
    assert (run.processes, run.rows) == (4, 16)
    # A group may span ranks, as far as the round holds whole groups.
    assert planned(folder, processes=2, num_generations=32).run.group_size == 32
    with pytest.raises(ValueError, match="num_generations=32"):
        planned(folder, processes=1, num_generations=32)


def test_the_model_is_that_of_its_configuration(folder):
    plan = planned(folder)
    assert plan.model == model_size(load_config(str(folder / "tiny-model")))
    assert plan.model.parameters == sum(p.numel() for p in tiny_model().parameters())
    assert plan.adapter.adapted == {"q_proj", "v_proj"}


def test_an_adapter(folder):
    plan = planned(folder, use_peft="true", lora_r=2, lora_target_modules="all-linear")
    assert {"q_proj", "down_proj"} < plan.model.adapted
    assert plan.adapter is None


def test_without_an_adapter_for_the_model_none_is_proposed(folder):
    # Of this architecture peft does not know which modules to adapt.
    model_folder = folder / "olmo"
    OlmoConfig(
        vocab_size=95,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    ).save_pretrained(model_folder)
    assert planned(folder, model_name_or_path=model_folder).adapter is None


def test_options_of_an_adapter_without_one_are_refused(folder):
    with pytest.raises(ValueError, match="lora_r=16: no effect without an adapter"):
        planned(folder, lora_r=16)


@pytest.mark.parametrize(
    ("has_gpu", "given", "expected"),
    [(False, 24, 24e9), (False, None, "cpu"), (True, None, "cuda:0")],
)
def test_the_device(folder, monkeypatch, has_gpu, given, expected):
    monkeypatch.setattr(memory_plan, "device_bytes", str)
    changes = {} if given is None else {"device_memory_gb": given}
    if has_gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        changes["use_cpu"] = "true"
    assert planned(folder, **changes).device_bytes == expected


def test_without_a_gpu_half_precision_can_be_planned_for_one(folder):
    run = planned(folder, use_cpu="false", bf16="true", device_memory_gb=80).run
    assert run.product_bytes == 2


# --- Examples of a dataset ---


PROMPT, ANSWER = 60, 90
SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
MAKERS = {"sft": sft_runs, "dpo": dpo_runs, "kto": kto_runs, "reward": reward_runs}


def examples(method):
    """Rows whose prompts and answers have the longest lengths; an end token is one of an answer."""
    texts = {
        size: [
            "".join(chr(97 + (7 * row + place) % 26) for place in range(size)) for row in range(4)
        ]
        for size in (PROMPT, ANSWER - 1, ANSWER + PROMPT - 1)
    }
    if method == "sft":
        return Dataset.from_dict({"text": texts[ANSWER + PROMPT - 1]})
    rows = {"prompt": texts[PROMPT]}
    if method == "kto":
        labels = [True, False] * 2
        return Dataset.from_dict(rows | {"completion": texts[ANSWER - 1], "label": labels})
    other = [text.upper() for text in texts[ANSWER - 1]]
    return Dataset.from_dict(rows | {"chosen": texts[ANSWER - 1], "rejected": other})


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "checkpointing", "micro-batches"],
)
@pytest.mark.parametrize("method", MAKERS)
def test_peaks_of_runs_on_examples(tmp_path, method, options):
    options = {"max_steps": 2, "max_length": PROMPT + ANSWER, "optim": "adamw_torch"} | options
    options |= {"per_device_train_batch_size": 4 // options.get("gradient_accumulation_steps", 1)}
    model = reward_runs.classifier(**SHAPE) if method == "reward" else tiny_model(**SHAPE)
    given = {"ref_model": False} if method == "kto" else {}
    tracker = TensorBytes(model.parameters())
    trainer = MAKERS[method].make_trainer(
        tmp_path, data=examples(method), model=model, **given, **options
    )
    copied = getattr(trainer.reference, "model", None)
    with tracker:
        for parameter in [] if copied is None else copied.parameters():
            tracker.add(parameter.data)
        trainer.train()
    script = ScriptArguments(longest_prompt=PROMPT)
    run = memory_plan.settings(script, trainer.args, ModelConfig(), model.config)
    size = model_size(model.config, classifies=method == "reward")
    assert run.shared_prefix and run.reference == (method in ("dpo", "kto"))
    assert Estimate(size, run).peak == pytest.approx(tracker.peak, rel=0.1)


@pytest.mark.parametrize(
    ("method", "changes", "fields"),
    [
        ("dpo", {}, {"prompt": 32, "completion": 32, "reference": True}),
        ("dpo", {"max_length": 3000}, LONG),
        ("dpo", {"max_prompt_length": 20}, {"prompt": 20, "completion": 44, "reference": True}),
        ("dpo", {"longest_prompt": 50}, {"prompt": 50, "completion": 14, "reference": True}),
        ("dpo", {"max_completion_length": 9}, {"completion": 9, "reference": True}),
        ("dpo", {"precompute_ref_log_probs": "true"}, {}),
        ("dpo", {"reference_free": "true"}, {}),
        ("dpo", {"max_tokens_per_piece": 200}, {"micro_batch": 4, "reference": True, **PIECES}),
        ("reward", {}, {}),
        ("kto", {}, {"reference": True, "group_size": 1, "micro_batch": 8}),
        ("kto", {"gradient_accumulation_steps": 2}, {"reference": True, **ALONE}),
        ("sft", {}, {"group_size": 1, "prompt": 0, "completion": 64, "micro_batch": 8}),
    ],
)
def test_examples_become_rows(folder, method, changes, fields):
    """Eight pairs share 32 tokens of a prompt, and have 32 of their own."""
    names = {"bf16": "false", "use_cpu": "true", "output_dir": "out", "max_length": 64} | changes
    parser = make_parser(method)
    given = [str(word) for name, x in names.items() for word in (f"--{name}", x)]
    words = ["--model_name_or_path", str(folder / "tiny-model"), *given]
    built = memory_plan.build_options(parser, parser.read(words).values, 1)
    pairs = RunSettings(2, 32, 32, 16, generates=False, on_cpu=True)
    assert memory_plan.make_plan(built.script, built.training, built.model).run == pairs.replace(
        **fields
    )


def test_the_plan_of_pairs_is_in_examples(folder, capsys):
    options = {"method": "dpo", "max_length": 64, "device_memory_gb": 1, "bf16": "false"}
    model = ["--model_name_or_path", str(folder / "tiny-model"), "--output_dir", "out"]
    main([*model, *(str(word) for name, x in options.items() for word in (f"--{name}", x))])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Micro-batch: 16 rows of up to 64 tokens, 752 tokens in one forward" in shown
    assert "max_length 64 256 (the model's context)" in shown
    assert "per_device_train_batch_size 8 8 (all rows of an update)" in shown
    assert "shared_prefix=false" in shown and "beta=0" not in shown
    assert "Note: Prompts are assumed to have up to 32 tokens; give --longest_prompt." in shown


def test_a_value_model_of_its_own(folder):
    alone = planned(folder, "ppo").estimate
    values = planned(folder, "ppo", value_model_name_or_path=folder / "tiny-model").estimate
    size = values.run.value_model
    assert size.parameters < values.model.parameters and size.vocabulary == 0
    assert values.rank.weights - alone.rank.weights == 4 * size.parameters
    assert values.rank.optimizer - alone.rank.optimizer == 8 * size.parameters


def test_the_command_prints_the_plan(folder, capsys):
    main(words(folder, longest_prompt=64, device_memory_gb=1))
    shown = capsys.readouterr().out
    peak = planned(folder, longest_prompt=64, device_memory_gb=1).estimate.peak
    assert f"Peak: {peak / 1e6:.3g} MB, in " in shown
    assert "fits in 900 MB of a device of 1 GB" in shown
    assert "Note:" not in shown


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"longest_prompt": None}, "up to 248 tokens, what max_completion_length leaves of"),
        ({"longest_prompt": 249}, "have 257 tokens, more than the model's context of 256."),
        ({"optim": "lomo"}, "What lomo keeps is unknown"),
        ({"reward_model_name_or_path": "some/model"}, "The reward model is not counted."),
        ({"num_processes": 2}, "Every rank holds the whole model"),
        ({"use_fsdp": "", "num_processes": 2}, "FSDP sums whole gradients"),
    ],
)
def test_what_the_plan_leaves_out_is_said(folder, capsys, changes, note):
    options = {"longest_prompt": 64} | changes
    main(words(folder, **{k: v for k, v in options.items() if v is not None}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Note:" in line]
    assert note in line


def test_the_assumed_prompt_fits_the_context(folder, tmp_path, capsys):
    assert planned(folder, max_completion_length=64).run.prompt == 256 - 64
    assert planned(folder, max_completion_length=300).run.prompt == 1
    config = json.loads((folder / "tiny-model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    main(words(folder, model_name_or_path=tmp_path))
    assert f"up to {ASSUMED_PROMPT} tokens; give --longest_prompt." in capsys.readouterr().out


def divided(folder, *launcher, **changes):
    """The plan of a run under an engine, as the command makes it."""
    parser = make_parser("rloo")
    arguments = split_arguments(parser, [*words(folder, **changes), *launcher])
    return memory_plan.plan_of(
        parser, parser.read(arguments.script_argv).values, launch_options(arguments.launcher_argv)
    )


ZERO3 = ("--accelerate_config", "zero3", "--num_processes", "2")
FSDP2 = ("--accelerate_config", "fsdp2", "--num_processes", "2")


def test_the_engine_divides_the_model(folder):
    found = divided(folder, *ZERO3).run
    assert found.sharding == Sharding("zero", 3, 2, syncs=True)
    assert (found.weight_bytes, found.loaded_bytes, found.gathers) == (4, None, True)
    half = divided(folder, *FSDP2, bf16="true").run
    assert half.sharding == Sharding("fsdp2", 3, 2)
    assert (half.weight_bytes, half.product_bytes, half.loaded_bytes) == (2, 2, 4)
    alone = divided(folder, bf16="true").run
    assert (alone.weight_bytes, alone.loaded_bytes) == (4, None)


def test_ranks_divide_the_tokens_of_rows(folder):
    """The shipped configuration has eight processes, of which every two divide a row."""
    parser = make_parser("sft")
    options = ["--model_name_or_path", str(folder / "tiny-model"), "--output_dir", "out"]
    options += ["--bf16", "false", "--use_cpu", "--max_length", "101"]
    arguments = split_arguments(parser, [*options, "--accelerate_config", "fsdp2_cp"])
    plan = memory_plan.plan_of(
        parser, parser.read(arguments.script_argv).values, launch_options(arguments.launcher_argv)
    )
    assert plan.run.sharding == Sharding("fsdp2", 3, 8, per_row=2)
    shown = render(plan)
    assert "Micro-batch: 8 rows of up to 101 tokens, 400 tokens of each rank in one" in shown
    assert "Ranks: 8, FSDP2; every 2 of them divide the tokens of a row" in shown


def test_options_that_matter_under_an_engine(folder):
    layerwise = divided(folder, *ZERO3, ds3_gather_for_generation="false")
    assert not layerwise.run.gathers
    syncs = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
    assert divided(folder, *FSDP2, accelerator_config=syncs).run.sharding.syncs
    quantized = {"load_in_4bit": "true", "use_peft": "true"}
    assert not divided(folder, *FSDP2, **quantized).run.divides_quantized
    stored = quantized | {"bnb_4bit_quant_storage": "bfloat16"}
    assert divided(folder, *FSDP2, **stored).run.divides_quantized


def test_the_text_names_the_engine_and_what_others_would_change(folder):
    offload = ("--offload_optimizer_device", "cpu")
    shown = render(divided(folder, *ZERO3, *offload))
    assert "Ranks: 2, ZeRO-3; " in shown
    assert "of each rank in host memory" in shown
    assert "ds3_gather_for_generation=false" in shown
    assert "accelerate_config=zero2" in shown
    assert "fsdp_offload_params=true" in render(divided(folder, *FSDP2))
    assert "accelerate_config" not in render(divided(folder))


def test_a_generation_engine_on_the_same_device(folder):
    changes = {"use_vllm": "true", "device_memory_gb": 10, "vllm_gpu_memory_utilization": 0.5}
    awake = divided(folder, **changes)
    phases = awake.estimate.phases
    assert {parts.vllm for parts in phases.values()} == {5e9}
    assert phases["generation"].kv_cache == 0
    assert any("vLLM generates: " in note and "cache of" in note for note in awake.notes)
    computed = divided(folder, **changes | {"vllm_gpu_memory_utilization": "none"})
    assert computed.run.engine_bytes > 2 * computed.model.parameters
    assert computed.fits()
    sleeps = divided(folder, **changes, vllm_enable_sleep_mode="true").estimate.phases
    assert [parts.vllm for parts in sleeps.values()] == [5e9, 0, 0, 0]
    server = divided(folder, **changes, vllm_mode="server").estimate.phases
    assert {parts.vllm for parts in server.values()} == {0}
    with pytest.raises(ValueError, match="leaves no room for .* of weights on each GPU"):
        divided(folder, **changes | {"vllm_gpu_memory_utilization": 0.000001})


def test_options_stand_in_a_file(folder, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    options = {"model_name_or_path": str(folder / "tiny-model"), "method": "grpo", "beta": 0.1}
    options |= BASE | {"loss_type": "grpo", "num_processes": 2, "per_device_train_batch_size": 2}
    path.write_text(json.dumps(options | {"use_cpu": True, "bf16": False}))
    main(["--config", str(path)])
    shown = capsys.readouterr().out
    assert "Round per rank: 2 completions of up to 8 tokens, 4 for each prompt" in shown
    assert "reference" in shown


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_generations": 3}, "--num_generations 3"),
        ({"betta": 1}, "unknown option --betta (closest: --beta"),
        ({"method": "x"}, "--method: 'x' is not one of "),
        ({"loss_type": "dapo"}, "unknown option --loss_type"),
        ({"model_name_or_path": "absent"}, "The model 'absent': there is no such folder, and"),
        ({"config": "absent.yaml"}, "absent.yaml: there is no such file"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, changes, part):
    with pytest.raises(SystemExit) as end:
        main(words(folder, **changes))
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert lines[-1].startswith("trl memory-plan: error: ")
    assert part in lines[-1]


def test_a_model_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["--output_dir", "out"])
    assert "--model_name_or_path is required." in capsys.readouterr().err


def test_debugging_shows_where(folder, monkeypatch):
    monkeypatch.setenv("TRL_DEBUG", "1")
    with pytest.raises(ValueError, match="num_generations=3"):
        main(words(folder, num_generations=3))


def test_help_has_the_options_of_the_method(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help", "--method", "grpo"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: trl memory-plan ")
    assert all(name in shown for name in ("--method", "--loss_type", "--device_memory_gb"))


def test_nothing_is_loaded(folder, monkeypatch):
    """Not even where the files of the weights are empty."""
    for file in (folder / "tiny-model").glob("*.safetensors"):
        file.write_bytes(b"")
    plan = planned(folder)
    assert Estimate(plan.model, plan.run).peak == plan.estimate.peak > 0
