import dataclasses
import os
import typing
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import pytest
import yaml
from transformers import HfArgumentParser

import trl
from trl.cli.argv import to_argv
from trl.cli.commands import commands_with
from trl.cli.parser import ParsedOptions, TrlParser
from trl.cli.values import union_members
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.model_config import ModelConfig
from trl.trainer.rloo_config import RLOOConfig

BASE = ["--output_dir", "out", "--use_cpu", "--report_to", "none"]


def parse(words, *types):
    return TrlParser(types or (RLOOConfig,), prog="trl").parse_args_and_config([*BASE, *words])


def config_file(tmp_path, **values):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


SAMPLES = {
    bool: (["true"], True),
    int: (["3"], 3),
    float: (["0.5"], 0.5),
    dict: (['{"a": true}'], {"a": True}),
    list[float]: (["1", "-2e1"], [1.0, -20.0]),
    list[str]: (["a", "b"], ["a", "b"]),
    tuple[float, float]: (["-1", "1"], (-1.0, 1.0)),
    str: (["word"], "word"),
}


def sample(option, annotation):
    """Words for a listed name or the most specific type of an annotation, and their value."""
    enums = [kind for kind in union_members(annotation) if isinstance(kind, type(Enum))]
    names = [member.value for kind in enums for member in kind]
    names += option.metadata.get("choices", ())
    if names:
        return str, names[-1:], names[-1]
    kinds = [dict if typing.get_origin(m) is dict else m for m in union_members(annotation)]
    return next(((kind, *SAMPLES[kind]) for kind in SAMPLES if kind in kinds), None)


METHODS = ("SFT", "DPO", "KTO", "Reward", "RLOO", "GRPO", "OnlineDPO", "PPO")


@pytest.mark.parametrize("method", METHODS)
def test_the_parser_of_transformers_reads_all_options(method):
    """Scripts of users have it, with a configuration and arguments of their own."""
    kind = getattr(trl, f"{method}Config")
    parser = HfArgumentParser((kind, ModelConfig))
    config, model = parser.parse_args_into_dataclasses([*BASE, "--seed", "7", "--lora_r", "3"])
    assert type(config) is kind and (config.seed, model.lora_r) == (7, 3)
    assert parser.format_help()


@pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig, ModelConfig])
def test_every_option_is_read_with_its_type(config_class):
    """Values are read one at a time; whether they suit each other is the configuration's say."""
    parser = TrlParser((config_class,))
    hints = typing.get_type_hints(config_class)
    left_out = []
    for option in dataclasses.fields(config_class):
        if not option.init:
            continue
        known = sample(option, hints[option.name])
        if known is None:
            left_out.append(option.name)
            continue
        kind, words, expected = known
        for spelling in {option.name, option.name.replace("_", "-")}:
            parsed = parser.read([f"--{spelling}", *words])
            assert parsed == ParsedOptions({option.name: expected}, [], {}, []), option.name
            assert type(parsed.values[option.name]) is (typing.get_origin(kind) or kind), (
                option.name
            )
    assert set(left_out) <= {"parallelism_config"}, "an object, no text"


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--reward_clip_range -1 1", "reward_clip_range", (-1.0, 1.0)),
        ("--reward_clip_range -.5 inf", "reward_clip_range", (-0.5, float("inf"))),
        ("--reward_clip_range none", "reward_clip_range", None),
        ("--reward_weights none", "reward_weights", None),
        ("--reward_weights 2", "reward_weights", [2.0]),
        ("--generation-batch-size None", "generation_batch_size", None),
        ("--no-shuffle-dataset", "shuffle_dataset", False),
        ("--shuffle_dataset=false", "shuffle_dataset", False),
        ("--shuffle_dataset", "shuffle_dataset", True),
        ("--max_steps -1", "max_steps", -1),
        ("--pad_to_multiple_of 8", "pad_to_multiple_of", 8),
        ("--pad_to_multiple_of auto", "pad_to_multiple_of", "auto"),
        ("--run_name 5", "run_name", "5"),
        ("--report_to none", "report_to", "none"),
        ("--kl_coef 1e-3", "kl_coef", 1e-3),
        ("--rloo-k 4", "rloo_k", 4),
        ("--exp_name 7", "exp_name", "7"),
        ("--normalize_reward", "normalize_reward", True),
        ("--stop_token_id 3", "stop_token_id", 3),
    ],
)
def test_words_and_their_values(words, name, expected):
    parsed = TrlParser((RLOOConfig,)).read(words.split())
    assert parsed == ParsedOptions({name: expected}, [], {}, [])
    assert type(parsed.values[name]) is type(expected)


def test_types_that_are_easily_lost():
    args = parse(
        [
            *("--reward_clip_range", "-1e-3", "1e3", "--reward_weights", "1", "2"),
            *("--generation_kwargs", '{"top_k": 3}', "--min_p", "none", "--epsilon-high", "0.3"),
            *("--no_shuffle_dataset", "--log_completions", "--temperature", "1"),
        ]
    )[0]
    assert args.reward_clip_range == (-0.001, 1000.0) and args.reward_weights == [1.0, 2.0]
    assert args.generation_kwargs == {"top_k": 3} and args.min_p is None
    assert args.epsilon_high == 0.3 and args.shuffle_dataset is False and args.log_completions
    assert isinstance(args.temperature, float)


@pytest.mark.parametrize(("word", "scale"), [("false", "none"), ("True", "group"), ("batch",) * 2])
def test_scale_rewards_takes_booleans(word, scale):
    assert parse(["--scale_rewards", word], GRPOConfig)[0].scale_rewards == scale


def test_precedence_and_conversion_of_the_file(tmp_path):
    path = config_file(
        tmp_path,
        learning_rate="1e-5",
        temperature=1,
        beta=0.5,
        reward_clip_range=[-1, 1],
        reward_weights=[1, "2e0"],
        generation_kwargs={"top_k": 3},
        run_name=5,
        num_iterations="2",
        epsilon=0.3,
        env={"TRL_TEST_VALUE": 7},
    )
    for words in (["--config", path], [f"--config={path}"]):
        args = parse([*words, "--beta", "0.25"])[0]
        assert (args.learning_rate, args.beta, args.epsilon) == (1e-5, 0.25, 0.3)
        assert args.reward_clip_range == (-1.0, 1.0) and args.temperature == 1.0
        assert isinstance(args.temperature, float)
        assert args.reward_weights == [1.0, 2.0]
        assert args.generation_kwargs == {"top_k": 3}
        assert (args.run_name, args.num_iterations) == ("5", 2)
        assert args.top_p == 1.0, "a default"
    assert os.environ.pop("TRL_TEST_VALUE") == "7"


def test_unknown_options_name_the_closest(tmp_path):
    with pytest.raises(ValueError, match=r"unknown option --lerning_rate .*--learning_rate"):
        parse(["--lerning_rate", "1"])
    with pytest.raises(ValueError, match=r"config\.yaml: unknown key betta \(closest: beta"):
        parse(["--config", config_file(tmp_path, betta=1)])
    parser = TrlParser((RLOOConfig,))
    words = [*BASE, "--config", config_file(tmp_path, first=1), "--second", "2"]
    *_, file, line = parser.parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (file, line) == (["--first", "1"], ["--second", "2"])


def test_wrong_values_are_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(["--learning_rate", "fast"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "trl: error: --learning_rate: 'fast' is not a number.\n"


def test_files_must_be_mappings(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        parse(["--config", str(path)])
    with pytest.raises(ValueError, match=r"env in .* must be a mapping"):
        parse(["--config", config_file(tmp_path, env=[1])])
    with pytest.raises(FileNotFoundError, match=r"--config nowhere\.yaml: there is no such file"):
        parse(["--config", "nowhere.yaml"])


def test_old_names(tmp_path):
    with pytest.warns(FutureWarning, match="rloo_k is now num_generations"):
        assert parse(["--rloo_k", "4"])[0].num_generations == 4
    with pytest.warns(FutureWarning, match="kl_coef is now beta"):
        assert parse(["--config", config_file(tmp_path, kl_coef=0.3)])[0].beta == 0.3
    with pytest.raises(ValueError, match="both rloo_k and num_generations were given"):
        parse(["--rloo_k", "4", "--num_generations", "4"])
    with pytest.raises(ValueError, match="both rloo_k and num_generations were given"):
        parse(["--config", config_file(tmp_path, rloo_k=4), "--num_generations", "4"])
    with pytest.warns(FutureWarning, match="kl_coef is now beta"):
        assert parse(["--config", config_file(tmp_path, kl_coef="1e-3")])[0].beta == 0.001


def test_several_dataclasses_share_one_line():
    training, model = parse(["--lora_r", "4", "--beta", "0"], RLOOConfig, ModelConfig)
    assert (training.beta, model.lora_r) == (0.0, 4)


def test_old_names_take_the_type_of_the_new_ones(tmp_path):
    parser = TrlParser((RLOOConfig,))
    path = config_file(tmp_path, kl_coef="1e-2", normalize_reward="yes")
    values = parser.read(["--config", path, "--cliprange", "1e-1", "--num-ppo-epochs", "2"]).values
    assert values == {
        **{"kl_coef": 0.01, "normalize_reward": True, "cliprange": 0.1, "num_ppo_epochs": 2}
    }


def test_old_names_without_a_new_one_are_read_as_yaml():
    parser = TrlParser((RLOOConfig,))
    words = ["--token_level_kl", "--stop_token", "[", "--missing_eos_penalty", "1.5"]
    values = parser.read([*words, "--stop-token-id", "none"]).values
    expected = {"token_level_kl": True, "stop_token": "[", "missing_eos_penalty": 1.5}
    assert values == expected | {"stop_token_id": "none"}


def test_a_field_goes_before_an_old_name_of_another_class():
    @dataclass
    class New:
        size: int = 1
        legacy_options: ClassVar = {"batch_size": "size"}

    @dataclass
    class Mine:
        batch_size: int = 2

    for types in ((New, Mine), (Mine, New)):
        built = TrlParser(types).parse_args_and_config(["--batch-size", "5"])
        assert sorted(map(repr, built)) == sorted(map(repr, (New(1), Mine(5))))


@pytest.mark.parametrize("spelling", ["--no_log_completions", "--no-log-completions"])
def test_every_flag_has_an_opposite(tmp_path, spelling):
    path = config_file(tmp_path, log_completions=True)
    assert parse(["--config", path])[0].log_completions is True
    assert parse(["--config", path, spelling])[0].log_completions is False
    assert parse(["--no_bf16"])[0].bf16 is False


def test_what_is_no_flag_has_no_opposite():
    with pytest.raises(ValueError, match=r"--no_learning_rate \(closest: --learning_rate"):
        parse(["--no_learning_rate"])


def test_a_field_may_look_like_an_opposite():
    @dataclass
    class Cuda:
        cuda: bool = True
        no_cuda: bool = False

    (built,) = TrlParser(Cuda).parse_args_and_config(["--no_cuda"])
    assert built == Cuda(cuda=True, no_cuda=True)


@pytest.mark.parametrize("in_file", [False, True])
def test_values_outside_of_the_choices(tmp_path, capsys, in_file):
    values = {"loss_type": "dapoo"}
    words = ["--config", config_file(tmp_path, **values)] if in_file else ["--loss_type", "dapoo"]
    with pytest.raises(SystemExit) as end:
        parse(words, GRPOConfig)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("trl: error: --loss_type: 'dapoo' is not one of grpo, dr_grpo, dapo,")
    assert error.count("\n") == 1


def test_choices_hold_for_each_item_of_a_list(capsys):
    @dataclass
    class Colors:
        colors: list[str] = field(
            default_factory=list, metadata={"choices": ["red", "green"], "help": "Colors."}
        )

    parser = TrlParser(Colors, prog="trl")
    assert parser.parse_args_and_config(["--colors", "red", "green"]) == (Colors(["red", "green"]),)
    with pytest.raises(SystemExit):
        parser.parse_args_and_config(["--colors", "red", "blue"])
    assert capsys.readouterr().err == "trl: error: --colors: 'blue' is not one of red, green.\n"
    assert "{red,green}" in parser.format_help()


def test_the_word_no_in_a_file_is_a_strategy(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("eval_strategy: no\nsave_strategy: no\nlogging_strategy: no\n")
    args = parse(["--config", str(path)])[0]
    assert (args.eval_strategy, args.save_strategy, args.logging_strategy) == ("no", "no", "no")


def test_keys_of_a_file_may_have_hyphens(tmp_path):
    assert parse(["--config", config_file(tmp_path, **{"max-steps": 3})])[0].max_steps == 3


@pytest.mark.parametrize("value", [False, None, True, [1]])
def test_no_unknown_key_of_a_file_is_overlooked(tmp_path, value):
    with pytest.raises(ValueError, match=r"unknown key save_steps_ \(closest: save_steps"):
        parse(["--config", config_file(tmp_path, save_steps_=value)])


def test_a_key_may_have_any_name(tmp_path):
    path = config_file(tmp_path, self=1)
    unused = TrlParser((ModelConfig,)).read(["--config", path]).unknown_config
    assert unused == {"self": 1}


def test_required_fields_and_reserved_names(capsys):
    @dataclass
    class Needs:
        must: int
        more: list[str] = field(default_factory=list)

    @dataclass
    class Reserved:
        config: str = ""

    with pytest.raises(SystemExit):
        TrlParser(Needs).parse_args_and_config([])
    assert "--must is required" in capsys.readouterr().err
    assert TrlParser(Needs).parse_args_and_config(["--must", "1"])[0] == Needs(1)
    with pytest.raises(ValueError, match="called config"):
        TrlParser(Reserved)


def test_defaults_for_options():
    parser = TrlParser((ModelConfig,))
    assert parser.set_defaults_with_config(lora_r=3, other=[1, 2]) == ["--other", "1", "2"]
    assert parser.parse_args_and_config([])[0].lora_r == 3


def test_options_added_by_hand_come_in_a_namespace():
    parser = TrlParser(ModelConfig, prog="trl")
    parser.add_argument("--extra", type=int, default=3)
    model, own = parser.parse_args_and_config(["--extra", "5", "--model_name_or_path", "m"])
    assert (model.model_name_or_path, vars(own)) == ("m", {"extra": 5})
    model, own, rest = parser.parse_args_and_config(["--left"], return_remaining_strings=True)
    assert (vars(own), rest) == ({"extra": 3}, ["--left"])


def test_words_left_over_may_be_for_another_program():
    parser = TrlParser(prog="trl")
    parser.check_unknown(["--num_proc", "2"], {"num_proc"})
    with pytest.raises(ValueError, match=r"^unknown option --num_prc \(closest: --num_proc\)\.$"):
        parser.check_unknown(["--num_prc", "2"], {"num_proc"})
    with pytest.raises(ValueError, match=r"^unexpected words: 2 3\.$"):
        parser.check_unknown(["2", "3"])


@dataclass
class Known:
    beta: float = 1.0
    models: int = 1
    text_file: str = ""


@pytest.mark.parametrize(
    ("name", "program", "hint"),
    [
        ("packing", "trl memory-plan", " (an option of `trl sft`)"),
        ("method", "trl grpo", " (an option of `trl memory-plan`, `trl lengths`)"),
        ("step", "trl grpo", " (an option of `trl completions`)"),
        ("port", "trl rloo", " (an option of `trl vllm-serve`)"),
        ("loss_type", "train.py", ""),
        ("qqqq", "trl rloo", ""),
        ("no_shuffle_dataset", "trl rloo", ""),
    ],
)
def test_another_command_may_know_it(name, program, hint):
    commands = commands_with if program.startswith("trl ") else None
    problem = TrlParser(Known, prog=program, commands_with=commands).unknown_options_error(
        [f"--{name}"]
    )
    assert problem == f"unknown option --{name}{hint}."


def test_values_that_are_names_of_options_stay():
    parser = TrlParser(Known)
    values = parser.read(["--text-file", "models", "--models=2"]).values
    assert values == {"text_file": "models", "models": 2}


def test_the_closest_names_come_first():
    found = TrlParser(Known, prog="trl rloo", commands_with=commands_with).unknown_options_error(
        ["--model"]
    )
    expected = "unknown option --model (closest: --models; an option of `trl vllm-serve`)."
    assert found == expected


def test_keys_of_a_file_are_named_with_it(tmp_path):
    parser = TrlParser(Known, prog="train.py")
    path = config_file(tmp_path, betta=1, y=2)
    parsed = parser.read_with_errors(["--x", "--config", path])
    found = parser.unknown_options_error([*parsed.unknown_argv, *to_argv(parsed.unknown_config)])
    expected = f"unknown option --x; {path}: unknown keys betta (closest: beta), y."
    assert found == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_file_may_write_every_number_as_yaml_reads_text(tmp_path, method):
    """YAML 1.1 takes 1e1 for text."""
    kinds = getattr(trl, f"{method}Config"), ModelConfig
    parser = TrlParser(kinds, prog="trl")
    numbers = {}
    for kind in kinds:
        for name, annotation in typing.get_type_hints(kind).items():
            types = {typing.get_origin(member) or member for member in union_members(annotation)}
            if name in parser.names and types & {int, float} and str not in types:
                numbers[name] = int if int in types else float
    assert {"learning_rate", "max_steps", "save_total_limit", "lora_dropout"} < set(numbers)
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"{name}: 1e1\n" for name in numbers))
    assert yaml.safe_load(path.read_text()) == dict.fromkeys(numbers, "1e1")
    values = parser.read(["--config", str(path)]).values
    assert {name: type(value) for name, value in values.items()} == numbers
    assert set(values.values()) == {10}


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (["--loss_type", "ipo"], "", ["ipo"]),
        (["--loss_type", "sigmoid", "sft"], "", ["sigmoid", "sft"]),
        ([], "loss_type: ipo", ["ipo"]),
        ([], "loss_type: [sigmoid, sft]\nloss_weights: [1e-1, 1]", ["sigmoid", "sft"]),
        (["--loss_type", "hinge"], "loss_type: [sigmoid, sft]", ["hinge"]),
    ],
)
def test_one_loss_or_several(tmp_path, words, text, expected):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    (config,) = parse(["--config", str(path), *words], trl.DPOConfig)
    assert config.loss_type == expected
    assert sum(config.losses.values()) == (1.1 if "loss_weights" in text else len(expected))


@pytest.mark.parametrize("in_file", [False, True])
def test_options_of_earlier_releases_of_transformers(tmp_path, in_file):
    words = ["--warmup_ratio", "0.1", "--overwrite_output_dir"]
    if in_file:
        path = tmp_path / "c.yaml"
        path.write_text("warmup_ratio: 1e-1\noverwrite_output_dir: true\n")
        words = ["--config", str(path)]
    with pytest.warns(FutureWarning, match="warmup_ratio is now warmup_steps; overwrite_output"):
        (config,) = parse(words, trl.SFTConfig)
    assert config.warmup_steps == 0.1 and config.get_warmup_steps(100) == 10
    assert config.output_dir == "out"
