"""The commands of `trl`. To add one, add an entry to `COMMANDS`.

Nothing heavy is imported to list the commands.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pydoc import locate

from ..imports import check_versions
from ..suggestions import did_you_mean
from .argv import launch_option_names, required_options_error
from .methods import METHODS, Method
from .options import class_from_source, option_actions, short_help
from .parser import TrlParser

HELP_FLAGS = {"-h", "--help"}


@dataclass(frozen=True)
class Command:
    """A command run by a module with `main(argv)`, and `make_parser()` if it has options."""

    name: str
    summary: str  # what the command does, for `trl --help`
    module: str

    def run(self, argv: list[str]) -> None:
        """Run the command with the arguments after its name."""
        import_module(self.module).main(argv)

    def option_parser(self) -> argparse.ArgumentParser:
        """Return a parser of the command's options, to look up names in."""
        parser: argparse.ArgumentParser = import_module(self.module).make_parser()
        return parser


@dataclass(frozen=True, kw_only=True)
class PreviewCommand(Command):
    """A command that takes the options of a training command and shows what that would do.

    Its help is made without importing its module, which takes seconds.
    """

    source: str  # path of the dataclass with the command's own options, `method` among them
    needed: tuple[str, ...]  # required options
    common: tuple[str, ...]  # options of training that `--help` lists, if the method has them
    example: str  # options of an example, for `--help`

    def option_parser(self) -> TrlParser:
        """Return a parser of the command's own options, to look up names in."""
        return TrlParser(class_from_source(self.source), add_help=False)

    def run(self, argv: list[str]) -> None:
        """Show help, or run the module."""
        if "--help-all" in argv:
            self.full_parser(argv).print_help()
        elif HELP_FLAGS.intersection(argv):
            print(self.help(argv))
        else:
            self.check_names(argv)
            super().run(argv)

    def check_names(self, argv: list[str]) -> None:
        """End the process with an error if an option is neither known here nor to accelerate."""
        parser = self.full_parser(argv)
        try:
            parsed = parser.read_with_errors(argv)
            parser.check_unknown(parsed.unknown, launch_option_names())
        except (ValueError, OSError) as error:
            parser.error(" ".join(str(error).split()))

    def full_parser(self, argv: list[str]) -> TrlParser:
        """Return a parser of the options of this command and of the command in `--method`."""
        own_parser = self.option_parser()
        method = getattr(own_parser.parse_known_args(argv)[0], "method", None)
        if method not in METHODS:
            method = own_parser.default("method")
        training_parser = METHODS[method].option_parser()
        return TrlParser(
            (*own_parser.dataclass_types, *training_parser.dataclass_types),
            prog=f"trl {self.name}",
            commands_with=commands_with,
        )

    def help(self, argv: list[str]) -> str:
        """Return help on the command's own options, and on common ones of training."""
        parser = self.full_parser(argv)
        common = [name for name in self.common if parser.knows(name)]
        sections = {
            "required": self.needed,
            "options": self.option_parser().names,
            "common options of training": (*common, "config"),
        }
        return "\n".join(
            [
                f"usage: trl {self.name} [options]\n\n{self.summary}\n\nexample:",
                f"  trl {self.name} {self.example}\n",
                short_help(parser, sections),
                f"`trl {self.name} --help-all` lists all {len(parser.names)} options, with those "
                "of the training command\nthat --method names.",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(Command):
    """A command that starts workers through `accelerate launch`, from `trl.scripts.NAME`."""

    method: Method
    module: str = ""  # unused: the workers run `trl.cli.train`

    def make_parser(self) -> TrlParser:
        """Return a parser that imports and builds the dataclasses."""
        return self.method.make_parser(commands_with=commands_with)

    def option_parser(self) -> TrlParser:
        """Return a parser of the same options that imports nothing heavy and builds nothing."""
        return self.method.option_parser(commands_with=commands_with)

    def run(self, argv: list[str]) -> None:
        """Show help, report all errors in the arguments at once, or start the workers."""
        parser = self.option_parser()
        if "--help-all" in argv:
            parser.print_help()
        elif HELP_FLAGS.intersection(argv):
            print(self.help(parser))
        else:
            self._check_and_launch(parser, argv)

    def _check_and_launch(self, parser: TrlParser, argv: list[str]) -> None:
        try:
            check_versions()
            errors = self.errors(parser, argv)
        except (ImportError, ValueError, OSError) as error:  # an old package, or an unreadable file
            parser.error(" ".join(str(error).split()))
        if errors:
            parser.error(f"{' '.join(errors)} `trl {self.name} --help` has an example.")
        values = parser.read_with_errors(argv).values
        if values.get("plan"):
            COMMANDS["memory-plan"].run([*argv, "--method", self.name])
            return
        # `launch` imports torch and transformers, which takes seconds.
        print(f"Loading {values['model_name_or_path']} ...", flush=True)
        import_module("trl.cli.launch").launch(self.name, parser, argv)

    def errors(self, parser: TrlParser, argv: Sequence[str]) -> list[str]:
        """Return errors about unknown and missing options, and values that do not fit."""
        parsed = parser.read_with_errors(argv)
        if parsed.values.get("plan"):
            return []  # `memory-plan` has more options, and checks all of them
        errors = []
        unknown_error = parser.unknown_options_error(parsed.unknown, launch_option_names())
        if unknown_error:
            errors.append(unknown_error)
        errors += parsed.errors
        missing = []
        for first, *alternatives in self.method.needed:
            if not any(parsed.values.get(name) for name in (first, *alternatives)):
                missing.append(first + "".join(f" (or --{name})" for name in alternatives))
        if missing:
            errors.append(required_options_error(missing))
        return errors

    def help(self, parser: TrlParser) -> str:
        """Return help on the options that a first run needs."""
        needed = [name for alternatives in self.method.needed for name in alternatives]
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
        """Train in this worker process, as its command line says."""
        if {*HELP_FLAGS, "--help-all"}.intersection(sys.argv):
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
                "device_memory_gb",
                "longest_prompt",
                "max_length",
                "max_completion_length",
                "per_device_train_batch_size",
                "num_generations",
                "use_vllm",
                "use_peft",
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
                "dataset_train_split",
                "max_length",
                "max_prompt_length",
                "packing",
                "per_device_train_batch_size",
                "device_memory_gb",
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
    """Return the error for an unknown command, with the command that was probably meant."""
    names = ", ".join(COMMANDS)
    if name in ABSENT:
        return f"`trl {name}` is not part of this release. Commands: {names}."
    hint = did_you_mean(name, COMMANDS, otherwise=f" Commands: {names}.")
    return f"unknown command {name!r}.{hint}"


def commands_with(option: str) -> list[str]:
    """Return the commands that have an option (with underscores)."""
    names = []
    for name, command in COMMANDS.items():
        if name == "env":  # it has no options
            continue
        action = option_actions(command.option_parser()).get(f"--{option}")
        is_negation = action is not None and action.dest != option  # --no_x sets x
        if action is not None and not is_negation:
            names.append(name)
    return names
