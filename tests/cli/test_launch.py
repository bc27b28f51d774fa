"""Which options go to the script, and which to `accelerate launch`."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny import save_tiny

from trl.cli import launch
from trl.cli.commands import COMMANDS
from trl.scripts import rloo
from trl.trainer.rloo_config import RLOOConfig

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "r"]
CONFIGS = sorted(
    p.stem for p in (Path(launch.__file__).parents[1] / "accelerate_configs").iterdir()
)


@pytest.fixture(autouse=True)
def no_user_configuration(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "absent.yaml"))


@pytest.fixture
def started(monkeypatch):
    """What `accelerate launch` was asked to do."""
    calls = []
    monkeypatch.setattr(launch, "launch_command", calls.append)
    return calls


def split(*words):
    arguments = launch.split_arguments(rloo.make_parser(), list(words))
    return arguments.script_argv, launch._parse_launcher_argv(arguments.launcher_argv)


def write(path, **values):
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_options_are_told_apart():
    ours, theirs = split(
        *("--num_generations", "4", "--num_processes", "2", "--reward_funcs", "a.b", "c.d"),
        *("--mixed-precision=bf16", "--learning_rate=1e-3", "--main_process_port", "0"),
    )
    assert ours == [
        *("--num_generations", "4", "--reward_funcs", "a.b", "c.d", "--learning_rate=1e-3")
    ]
    assert (theirs.num_processes, theirs.mixed_precision) == (2, "bf16")
    assert theirs.main_process_port == 0


def test_a_single_machine_is_spelled_out():
    _, theirs = split("--output_dir", "out")
    assert theirs.num_processes == max(1, torch.cuda.device_count())
    assert (theirs.num_machines, theirs.mixed_precision, theirs.dynamo_backend) == (1, "no", "no")
    assert split("--output_dir", "out", "--num_machines", "3")[1].num_machines == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads matter where training is on the CPU")
def test_all_cores_of_a_machine_without_gpus_are_used(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    for given, threads in (([], 6), (["--num_processes", "2"], 3), (["--num_processes", "9"], 1)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert split("--output_dir", "out", *given)[1].num_cpu_threads_per_process == threads
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert split("--output_dir", "out", *given)[1].num_cpu_threads_per_process is None


def test_a_configuration_of_the_user_is_left_to_accelerate(monkeypatch, tmp_path):
    path = write(tmp_path / "default.yaml", distributed_type="NO", num_processes=1)
    monkeypatch.setattr(launch, "default_config_file", path)
    arguments = launch.split_arguments(rloo.make_parser(), ["--output_dir", "out"])
    assert arguments.launcher_argv == []


def test_opposites_are_those_of_flags_alone():
    ours, theirs = split("--no_python", "--no_log_completions")
    assert ours == ["--no_log_completions"]
    assert theirs.no_python


def test_negative_numbers_are_values():
    ours, _ = split("--max_steps", "-1", "--lr_scheduler_kwargs", "{}", "--beta", "-1e-3")
    assert ours == ["--max_steps", "-1", "--lr_scheduler_kwargs", "{}", "--beta", "-1e-3"]


def test_options_of_accelerate_may_stand_in_the_file(tmp_path):
    path = write(
        tmp_path / "c.yaml", max_steps=1, num_processes=3, multi_gpu=True, mixed_precision="bf16"
    )
    ours, theirs = split("--config", path, "--mixed_precision", "fp16")
    assert ours == ["--config", path]
    assert theirs.num_processes == 3
    assert theirs.multi_gpu
    assert theirs.mixed_precision == "fp16"


def test_the_accelerate_configuration_may_stand_in_the_file(tmp_path):
    path = write(tmp_path / "c.yaml", accelerate_config="zero2", num_processes=4)
    _, theirs = split("--config", path)
    assert Path(theirs.config_file).name == "zero2.yaml"
    assert theirs.num_processes == 4
    assert Path(split("--config", path, "--accelerate_config", "fsdp1")[1].config_file).stem == (
        "fsdp1"
    )


def test_booleans_of_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "mixed_precision: no\nfsdp_offload_params: true\nfsdp_use_orig_params: false\n"
        "same_network: true\nmulti_gpu: false\nmachine_rank: null\naccelerate_config: fsdp1\n"
    )
    _, theirs = split("--config", str(path))
    assert theirs.mixed_precision == "no"  # the shipped configuration says bf16
    assert (theirs.fsdp_offload_params, theirs.fsdp_use_orig_params) == ("True", "False")
    assert theirs.same_network
    assert not theirs.multi_gpu
    assert theirs.machine_rank is None


@pytest.mark.parametrize("value", [False, True, None, [1], "x"])
def test_an_unknown_key_of_the_file_is_never_dropped(tmp_path, value):
    path = write(tmp_path / "c.yaml", num_proceses=value)
    with pytest.raises(
        ValueError, match=r"c\.yaml: unknown key num_proceses \(closest: num_processes"
    ):
        split("--config", path)


def test_the_environment_of_the_file_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_TEST_VALUE", "before")
    split("--config", write(tmp_path / "c.yaml", env={"TRL_TEST_VALUE": 7}))
    assert launch.os.environ["TRL_TEST_VALUE"] == "7"


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configurations_are_known_by_name(name):
    for words in (("--accelerate_config", name), (f"--accelerate-config={name}",)):
        _, theirs = split(*words)
        assert Path(theirs.config_file).stem == name
        assert yaml.safe_load(Path(theirs.config_file).read_text())["num_machines"] == 1


def test_a_file_is_taken_as_accelerate_configuration(tmp_path):
    path = write(tmp_path / "mine.yaml", distributed_type="NO", num_processes=1)
    assert split("--accelerate_config", path)[1].config_file == path


def test_cpu_reaches_both():
    ours, theirs = split("--output_dir", "out", "--cpu")
    assert ours == ["--output_dir", "out", "--use_cpu"]
    assert theirs.cpu
    assert not theirs.multi_gpu


@pytest.mark.parametrize(
    "words", [["--cpu"], ["--use_cpu"], ["--use-cpu", "true"], ["--config", "c.yaml"]]
)
def test_one_process_on_cpu_whatever_gpus_there_are(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "c.yaml", use_cpu=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert split("--beta", "0")[1].num_processes == 8
    _, theirs = split(*words)
    assert theirs.num_processes == 1
    assert not theirs.multi_gpu


@pytest.mark.parametrize("config", ["", "zero2"])
def test_cpu_with_several_processes(config):
    chosen = ["--accelerate_config", config] * bool(config)
    ours, theirs = split(*chosen, "--cpu", "--num_processes", "2")
    assert ours == ["--use_cpu"]
    assert theirs.multi_gpu or config
    assert not theirs.cpu  # accelerate would start one process
    assert theirs.num_processes == 2


def test_one_precision():
    """Workers that are told of two would end with the error of an engine."""
    zero3 = ["--accelerate_config", "zero3", "--num_processes", "1"]
    assert split(*zero3)[1].mixed_precision is None  # that of the configuration: bf16
    assert split(*zero3, "--bf16", "false")[1].mixed_precision == "no"
    assert split(*zero3, "--bf16", "false", "--fp16")[1].mixed_precision is None
    with pytest.raises(ValueError, match="--mixed_precision bf16 contradicts --bf16 false"):
        split(*zero3, "--bf16", "false", "--mixed_precision", "bf16")


def test_a_strategy_is_not_overruled():
    _, theirs = split("--num_processes", "2", "--use_deepspeed")
    assert theirs.use_deepspeed
    assert not theirs.multi_gpu


def test_the_workers_build_the_training_configuration(started):
    batch = {"per_device_train_batch_size": 1, "num_generations": 8}
    with pytest.raises(ValueError, match="num_generations"):
        RLOOConfig("out", **batch, use_cpu=True)  # one process cannot hold a group
    words = [word for name, value in batch.items() for word in (f"--{name}", str(value))]
    words += NEEDED
    COMMANDS["rloo"].run([*words, "--num_processes", "8"])
    (call,) = started
    assert (call.training_script, call.module) == ("trl.scripts.rloo", True)
    assert call.training_script_args == words
    assert call.num_processes == 8


def test_help_starts_nothing(started, capsys):
    COMMANDS["grpo"].run(["--output_dir", "out", "--help"])
    assert "usage: trl grpo" in capsys.readouterr().out
    assert started == []


@pytest.mark.parametrize("text", [None, "a: [1", "- a"], ids=["absent", "no YAML", "no mapping"])
def test_an_unusable_file_is_one_line(tmp_path, capsys, started, text):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as end:
        COMMANDS["rloo"].run(["--config", str(path)])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("trl rloo: error: ")
    assert str(path) in error
    assert error.count("\n") == 1
    assert started == []


@pytest.mark.parametrize(
    "words", [["--accelerate_config", "zero3"], ["--deepspeed", "x.json"], ["--use_deepspeed"]]
)
def test_deepspeed_must_be_installed(started, monkeypatch, capsys, words):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(SystemExit) as end:
        COMMANDS["rloo"].run([*NEEDED, *words])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "trl rloo: error: Training with DeepSpeed needs the package `deepspeed`, which is not "
        "installed. Run: pip install 'trl[deepspeed]'\n"
    )
    assert started == []


STRATEGIES = [*NEEDED, "--use_deepspeed", "--use_fsdp"]


def test_what_accelerate_refuses_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        COMMANDS["rloo"].run(STRATEGIES)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("trl rloo: error: You can only use one of")
    assert error.count("\n") == 1


def test_debugging_shows_where(monkeypatch):
    monkeypatch.setenv("TRL_DEBUG", "1")
    with pytest.raises(ValueError, match="You can only use one of"):
        COMMANDS["rloo"].run(STRATEGIES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "source"),
    [
        *((["--accelerate_config", x], f"--accelerate_config {x}") for x in CONFIGS),
        (["--accelerate_config", "gpus.yaml"], "--accelerate_config gpus.yaml"),
        (["--use_fsdp", "--num_processes", "2"], "--use_fsdp"),
        (["--multi_gpu", "--num_processes", "2"], "--multi_gpu"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    started, monkeypatch, tmp_path, capsys, words, source
):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gpus.yaml", distributed_type="MULTI_GPU", num_processes=4)
    monkeypatch.setattr(launch, "is_available", lambda package: True)  # DeepSpeed
    if source.endswith("multi_cpu"):
        COMMANDS["rloo"].run([*NEEDED, *words])
        assert started[0].num_processes is None or started[0].num_processes == 2
        return
    with pytest.raises(SystemExit) as end:
        COMMANDS["rloo"].run([*NEEDED, *words])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"trl rloo: error: {source} needs a GPU, and this machine has none. On CPUs, use "
        "--accelerate_config multi_cpu (two processes, or --num_processes), or leave it out for "
        "one process.\n"
    )
    assert started == []
    COMMANDS["rloo"].run([*NEEDED, *words, "--use_cpu"])
    assert len(started) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_configuration_is_named(started, monkeypatch, tmp_path, capsys):
    path = write(tmp_path / "default.yaml", distributed_type="FSDP", num_processes=2)
    for module in ("trl.cli.launch", "accelerate.commands.launch"):
        monkeypatch.setattr(f"{module}.default_config_file", path)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", path)
    with pytest.raises(SystemExit):
        COMMANDS["rloo"].run(NEEDED)
    assert f"The accelerate configuration {path} needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words", "several"),
    [
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, [], True),
        ({"distributed_type": "MULTI_CPU", "num_processes": 1}, [], False),
        ({"distributed_type": "NO", "num_processes": 1}, ["--num_processes", "2"], True),
        ({"distributed_type": "NO", "num_processes": 1}, [], False),
        ({"distributed_type": "MULTI_CPU", "mpirun_config": {"mpirun_hostfile": "h"}}, [], False),
        ({"distributed_type": "FSDP", "num_processes": 2}, [], False),
    ],
)
def test_a_configuration_starts_as_many_processes_as_it_says(tmp_path, config, words, several):
    """Accelerate starts one for MULTI_CPU and NO, whatever number is given."""
    path = write(tmp_path / "c.yaml", **config)
    _, theirs = split("--accelerate_config", path, *words)
    assert theirs.multi_gpu is several


@pytest.mark.parametrize(
    ("words", "on_cpu"),
    [
        (["--accelerate_config", "multi_cpu"], True),
        (["--use_cpu", "--accelerate_config", "multi_gpu"], True),
        (["--num_processes", "1"], False),
    ],
)
def test_workers_are_told_of_the_cpu(monkeypatch, words, on_cpu):
    seen = []
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    record = lambda options: seen.append(launch.os.environ.get("ACCELERATE_USE_CPU"))  # noqa: E731
    monkeypatch.setattr(launch, "launch_command", record)
    COMMANDS["rloo"].run([*NEEDED, *words])
    assert seen == ["true" if on_cpu else None]
    assert "ACCELERATE_USE_CPU" not in launch.os.environ


@pytest.mark.parametrize("threads", ["abc", "", "0", "1.5", "4,2"])
def test_a_bad_number_of_threads_is_named(started, monkeypatch, capsys, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(SystemExit) as end:
        COMMANDS["rloo"].run(NEEDED)
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"trl rloo: error: OMP_NUM_THREADS={threads!r} in the environment must be a whole number "
        "of threads for each process, at least 1. Set it to one, or unset it.\n"
    )
    assert started == []


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--num_processes", "3"], 3),
        (["--accelerate_config", "multi_cpu"], 2),
        (["--accelerate_config", "multi_cpu", "--num_processes", "5"], 5),
        ([], max(1, torch.cuda.device_count())),
    ],
)
def test_how_many_processes_will_start(words, count):
    theirs = launch.split_arguments(rloo.make_parser(), ["--use_cpu", *words]).launcher_argv
    assert launch.launch_options(theirs)["num_processes"] == count


def test_the_default_configuration_says_how_many_start(monkeypatch, tmp_path):
    path = write(tmp_path / "default.yaml", num_processes=7, distributed_type="MULTI_GPU")
    for module in ("launch", "config.config_args"):
        monkeypatch.setattr(f"accelerate.commands.{module}.default_config_file", path)
    assert launch.launch_options([])["num_processes"] == 7


@pytest.mark.parametrize("in_file", [False, True])
def test_a_plan_starts_nothing(started, tmp_path, capsys, in_file):
    model = save_tiny(tmp_path / "model")
    words = ["--model_name_or_path", model, "--use_cpu", "--num_processes", "2"]
    path = write(tmp_path / "c.yaml", plan=True, longest_prompt=9)
    words += ["--config", path] if in_file else ["--plan", "--longest_prompt", "9"]
    COMMANDS["grpo"].run([*words, "--loss_type", "grpo"])
    shown = capsys.readouterr().out
    assert started == []
    assert "Peak: " in shown
    assert "8 for each prompt of up to 9 tokens" in shown
    assert "Every rank holds the whole model" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--accelerate_config", "zero3"], {"use_deepspeed": True, "zero_stage": 3}),
        (
            ["--accelerate_config", "zero3", "--zero_stage", "2", "--num_machines", "2"],
            {"use_deepspeed": True, "zero_stage": 2, "num_processes": 8, "num_machines": 2},
        ),
        (
            ["--accelerate_config", "fsdp2", "--fsdp_offload_params", "true"],
            {"use_fsdp": True, "fsdp_version": 2, "fsdp_offload_params": "true"},
        ),
        (
            ["--accelerate_config", "zero3", "--use_fsdp"],
            {"use_fsdp": True, "use_deepspeed": False},
        ),
        (["--num_processes", "3"], {"use_fsdp": False, "num_processes": 3}),
    ],
)
def test_what_the_launcher_was_told(words, expected):
    theirs = launch.split_arguments(rloo.make_parser(), ["--use_cpu", *words]).launcher_argv
    found = launch.launch_options(theirs)
    assert {name: found[name] for name in expected} == expected


def test_a_plan_of_several_ranks(capsys, tmp_path):
    model = save_tiny(tmp_path / "model")
    words = ["--model_name_or_path", model, "--use_cpu", "--plan"]
    COMMANDS["rloo"].run([*words, "--accelerate_config", "zero3", "--num_processes", "2"])
    shown = capsys.readouterr().out
    assert "Ranks: 2, ZeRO-3" in shown
