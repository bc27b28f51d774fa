"""The commands of `trl`. A new one is an entry here; nothing heavy is imported to list them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pydoc import locate
from typing import Any

from ..imports import check_versions
from ..suggestions import did_you_mean
from .methods import METHODS, Method
from .options import class_from_source, option_actions, short_help
from .parser import TrlParser, as_words, launch_option_names, required


@dataclass(frozen=True)
class Command:
    """A command that a module runs: with `main(words)`, and `make_parser()` if it has options."""

    name: str
    summary: str  # what it does, for `trl --help`
    module: str

    def run(self, words: list[str]) -> None:
        """Run the command with the words behind its name."""
        import_module(self.module).main(words)

    def option_parser(self) -> Any:
        """The options of the command, to look names up."""
        return import_module(self.module).make_parser()


@dataclass(frozen=True, kw_only=True)
class PreviewCommand(Command):
    """A command that takes the options of a training command and looks at what it would do.

    Its help is made without importing its module, which takes long.
    """

    source: str  # the path of a dataclass with its own options; one is `method`
    needed: tuple[str, ...]  # options that must be given
    common: tuple[str, ...]  # options of training that `--help` lists, where the method has them
    example: str  # options, for `--help`

    def option_parser(self) -> TrlParser:
        """The options of its own, to look names up."""
        return TrlParser(class_from_source(self.source), add_help=False)

    def run(self, words: list[str]) -> None:
        """Show help, or run the module."""
        if "--help-all" in words:
            self.full_parser(words).print_help()
        elif {"-h", "--help"} & set(words):
            print(self.help(words))
        else:
            self.check_names(words)
            super().run(words)

    def check_names(self, words: list[str]) -> None:
        """Refuse options that neither this command has nor, where it reads those, a launcher."""
        parser = self.full_parser(words)
        try:
            _, _, others, rest = parser.collect(words)
            parser.check([*as_words(others), *rest], launch_option_names())
        except (ValueError, OSError) as error:
            parser.error(" ".join(str(error).split()))

    def full_parser(self, words: list[str]) -> TrlParser:
        """The options with those of the training command that `--method` names."""
        own = self.option_parser()
        method = getattr(own.parse_known_args(words)[0], "method", None)
        if method not in METHODS:
            method = own.default("method")
        kinds = (*own.dataclass_types, *METHODS[method].option_parser().dataclass_types)
        return TrlParser(kinds, prog=f"trl {self.name}", commands_with=commands_with)

    def help(self, words: list[str]) -> str:
        """The options of its own, and those that say what is looked at."""
        parser = self.full_parser(words)
        common = [name for name in self.common if parser.knows(name)]
        groups = {
            "required": self.needed,
            "options": self.option_parser().names,
            "common options of training": (*common, "config"),
        }
        return "\n".join(
            [
                f"usage: trl {self.name} [options]\n\n{self.summary}\n\nexample:",
                f"  trl {self.name} {self.example}\n",
                short_help(parser, groups),
                f"`trl {self.name} --help-all` lists all {len(parser.names)} options, with those "
                "of the training command\nthat --method names.",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(Command):
    """A command whose workers are started through `accelerate launch`, from `trl.scripts.NAME`."""

    method: Method
    module: str = ""  # its workers run `trl.cli.train`

    def make_parser(self) -> TrlParser:
        """A parser that builds the dataclasses, which it imports."""
        return self.method.make_parser(commands_with=commands_with)

    def option_parser(self) -> TrlParser:
        """A parser of the same options, which imports nothing heavy and builds nothing."""
        return self.method.option_parser(commands_with=commands_with)

    def run(self, words: list[str]) -> None:
        """Show help, report all mistakes in the words at once, or start the workers."""
        parser = self.option_parser()
        if "--help-all" in words:
            parser.print_help()
        elif {"-h", "--help"} & set(words):
            print(self.help(parser))
        else:
            try:
                check_versions()
                mistakes = self.mistakes(parser, words)
            except (ImportError, ValueError, OSError) as error:  # of versions, or the file
                parser.error(" ".join(str(error).split()))
            if mistakes:
                parser.error(f"{' '.join(mistakes)} `trl {self.name} --help` has an example.")
            values = parser.collect(words)[0]
            if values.get("plan"):
                COMMANDS["memory-plan"].run([*words, "--method", self.name])
                return
            # Libraries are imported now, which takes seconds.
            print(f"Loading {values['model_name_or_path']} ...", flush=True)
            import_module("trl.cli.launch").launch(self.name, parser, words)

    def mistakes(self, parser: TrlParser, words: Sequence[str]) -> list[str]:
        """Find unknown and missing options, and values that do not fit."""
        values, problems, others, rest = parser.collect(words)
        if values.get("plan"):
            return []  # the plan has further options, and tells of mistakes in all of them
        unknown = parser.unknown([*as_words(others), *rest], launch_option_names())
        missing = [names for names in self.method.needed if not any(values.get(x) for x in names)]
        words = [first + "".join(f" (or --{x})" for x in others) for first, *others in missing]
        return [*filter(None, [unknown]), *problems, *([required(words)] if words else [])]

    def help(self, parser: TrlParser) -> str:
        """The options that a first run needs."""
        needed = [name for names in self.method.needed for name in names]
        return "\n".join(
            [
                f"usage: trl {self.name} [options]\n\n{self.summary}\n\nexample:",
                f"  trl {self.name} {self.method.example}\n",
                short_help(parser, {"required": needed, "common": self.method.common}),
                f"`trl {self.name} --help-all` lists all {len(parser.names)} options. Options of "
                "`accelerate launch`, such as\n--num_processes 2, can be given too.",
            ]
        )

    def work(self) -> None:
        """Train as the words of this process say, as one of the workers."""
        if {"-h", "--help", "--help-all"} & set(sys.argv):
            self.run(sys.argv[1:])
            raise SystemExit(0)
        run_training = import_module("trl.cli.train").run_training
        run_training(self.make_parser(), locate(self.method.trainer))


TRAINING = {
    name: TrainingCommand(name, method.summary, method=method) for name, method in METHODS.items()
}
COMMANDS: dict[str, Command] = TRAINING | {
    command.name: command
    for command in (
        PreviewCommand(
            "memory-plan",
            "print how much memory a training command would take",
            "trl.cli.memory_plan",
            source="trl.cli.memory_plan.PlanArguments",
            needed=("model_name_or_path",),
            common=(
                *("device_memory_gb", "longest_prompt", "max_length", "max_completion_length"),
                *("per_device_train_batch_size", "num_generations", "use_vllm", "use_peft"),
            ),
            example="--method grpo --model_name_or_path Qwen/Qwen3-0.6B --device_memory_gb 80",
        ),
        PreviewCommand(
            "lengths",
            "show how long the rows of a dataset are, and what a limit would cost",
            "trl.cli.lengths",
            source="trl.cli.lengths.LengthsArguments",
            needed=("model_name_or_path", "dataset_name"),
            common=(
                *("dataset_train_split", "max_length", "max_prompt_length", "packing"),
                *("per_device_train_batch_size", "device_memory_gb"),
            ),
            example="--model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara",
        ),
        Command(
            "vllm-serve", "serve a model with vLLM for vllm_mode='server'", "trl.cli.vllm_serve"
        ),
        Command("completions", "show the completions a run wrote", "trl.cli.completions"),
        Command("report", "make an HTML page of a run, or of two to compare", "trl.cli.report"),
        Command("merge", "merge an adapter into its base model", "trl.cli.merge"),
        Command("env", "print versions for a bug report", "trl.cli.env"),
    )
}
ABSENT = ("distillation",)  # commands of Hugging Face TRL that this release does not have


def unknown_command(name: str) -> str:
    """Say that there is no such command, and which one was probably meant."""
    names = ", ".join(COMMANDS)
    if name in ABSENT:
        return f"`trl {name}` is not part of this release. Commands: {names}."
    hint = did_you_mean(name, COMMANDS, otherwise=f" Commands: {names}.")
    return f"unknown command {name!r}.{hint}"


def commands_with(option: str) -> list[str]:
    """The commands that have an option (with underscores)."""
    parsers = {name: x.option_parser() for name, x in COMMANDS.items() if name != "env"}
    found = {name: option_actions(x).get(f"--{option}") for name, x in parsers.items()}
    # The destination of no_x is x.
    return [name for name, action in found.items() if action and action.dest == option]
