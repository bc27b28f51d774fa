"""Kills training runs with SIGKILL, resumes them, and compares with a run that was left alone.

    python tests/distributed/killed_runs.py OUT --at generate:4 save:3  # at chosen points
    python tests/distributed/killed_runs.py OUT --kills 20 --processes 2  # at random moments
    python tests/distributed/killed_runs.py OUT --at backward:8 --trainer ppo

The runs are forked, so that nothing is imported again. A point is a place and the number of updates
made before it. The last line is JSON: for each resumed run, what differs from the one left alone.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "trainer")]

import dpo_runs  # noqa: E402
import kto_runs  # noqa: E402
import numpy as np  # noqa: E402
import rounding  # noqa: E402, F401
import torch  # noqa: E402
from engines import environment  # noqa: E402
from online_runs import TRAINERS, dataset, make_trainer  # noqa: E402
from reward_runs import classifier  # noqa: E402
from tiny import tiny_model  # noqa: E402

import trl.trainer.base.checkpoint as saving  # noqa: E402
from trl.trainer.base.checkpoint import checkpoints_in  # noqa: E402
from trl.trainer.offline.preference_trainer import PreferenceTrainer  # noqa: E402

LAST = 11
PATIENCE = 240
PROMPTS = ["a0", "b1", "c2", "d3"]
PREFERENCES = {"dpo": dpo_runs.make_trainer, "kto": kto_runs.make_trainer}
# Updates, logs, evaluations and a reference that moves, for every trainer.
RUN = {
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "learning_rate": 0.01,
    "max_steps": LAST,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
}


def noisy(completion_ids, **kwargs):
    """A reward that draws from every generator whose state a checkpoint holds."""
    return [
        (sum(ids) % 13) / 3 + random.random() + np.random.rand() + float(torch.rand(()))
        for ids in completion_ids
    ]


def trainer_in(folder, processes=1, **changes):
    """Rounds of 4 updates (4 micro-batches, 2 passes), two rounds an epoch, saved within rounds.

    Metrics are logged every other update, so some of them cross a checkpoint.
    """
    name = os.environ.get("KILLED_TRAINER", "rloo")
    on_cpu = "CPU_ENGINES" not in os.environ  # there, the engine chooses the device
    settings = RUN | {
        "per_device_train_batch_size": 2 // processes,
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if processes > 1 and on_cpu else None,
    }
    if name in PREFERENCES:
        settings |= {"train_sampling_strategy": "random", "eval_dataset": dpo_runs.pairs()}
        model = tiny_model(attention_dropout=0.1)
        options = {"disable_dropout": False} | settings | changes
        return PREFERENCES[name](folder, model=model, **options)
    settings |= {
        "reward": noisy,
        "script": None,
        "data": dataset(PROMPTS),
        "eval_dataset": dataset(["xy"]),
        "steps_per_generation": 4,
        "num_iterations": 2,
        "shuffle_dataset": True,
    }
    if name == "ppo":
        own = {"value_model": classifier(), "num_generations": 2, "num_ppo_epochs": 2}
        changes = own | changes
    return make_trainer(folder, **(settings | TRAINERS[name] | changes))


# --- Where a run ends itself ---


def end_at(trainer, place, step):
    """Have this process killed at a place, once `step` updates are made."""

    def deadly(function, after=False):
        def wrapper(*args, **kwargs):
            if trainer.state.global_step >= step and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if trainer.state.global_step >= step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    owners = (
        {}
        if isinstance(trainer, PreferenceTrainer)
        else {
            "generate": (trainer.backend, "generate"),
            "score": (trainer.scoring, "annotate"),
            "reward": (trainer.rewards, "_score"),
        }
    )
    owners |= {
        "backward": (trainer.accelerator, "backward"),
        "optimizer": (trainer, "_get_grad_norm"),
        "log": (trainer, "log"),
        "save": (trainer, "_save_optimizer_and_scheduler"),
        "state": (trainer, "_save_rng_state"),
        "seal": (saving, "seal"),
        "publish": (saving, "publish"),
        "rotate": (saving, "rotate"),
    }
    owner, name = owners[place]
    after = place in ("save", "state", "seal", "publish")
    setattr(owner, name, deadly(getattr(owner, name), after))


def run(folder, processes, point):
    """Train to the end, from the newest checkpoint if there is one; write what came out."""
    trainer = trainer_in(folder, processes)
    place, _, step = (point or "").partition(":")
    dying = 0 if place in ("seal", "publish", "rotate") else processes - 1
    if point and trainer.ranks.rank == dying:
        end_at(trainer, place, int(step))
    trainer.train(resume_from_checkpoint=bool(checkpoints_in(folder)) or None)
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        timed = ("time", "runtime", "per_second", "train_loss")
        logs = [
            {name: x for name, x in entry.items() if not any(word in name for word in timed)}
            for entry in trainer.state.log_history
        ]
        files = [Path(folder, place, "model.safetensors") for place in (".", "value_model")]
        weights = b"".join(file.read_bytes() for file in files if file.exists())
        written = sorted(Path(folder, "completions").glob("*.jsonl"))  # of online trainers
        outcome = {
            "weights": hashlib.sha256(weights).hexdigest(),
            "completions": {file.name: file.read_text() for file in written},
            "logs": logs,
            "learning rate": trainer.lr_scheduler.get_last_lr(),
            "tokens": trainer.state.num_input_tokens_seen,
        }
        (Path(folder) / "outcome.json").write_text(json.dumps(outcome))


# --- Processes ---


def start(folder, processes, point=None):
    """Fork the ranks of a run; what they print goes to a file."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                if processes > 1:
                    os.environ |= {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(processes),
                        "LOCAL_WORLD_SIZE": str(processes),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        **environment(os.environ.get("KILLED_ENGINE", "ddp")),
                    }
                run(folder, processes, point)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        ranks.append(child)
    return ranks


def finish(ranks, seconds, folder):
    """Wait for all ranks; kill them when one was killed or after so many seconds.

    Returns whether the run was killed.
    """
    deadline, codes = time.monotonic() + seconds, {}
    while len(codes) < len(ranks):
        for rank in set(ranks) - set(codes):
            child, status = os.waitpid(rank, os.WNOHANG)
            if child:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline or -signal.SIGKILL in codes.values():
            for rank in set(ranks) - set(codes):
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.005)
    if 1 in codes.values() and -signal.SIGKILL not in codes.values():
        raise SystemExit(Path(f"{folder}.txt").read_text()[-4000:])
    return -signal.SIGKILL in codes.values()


def complete(folder, processes):
    """Run to the end and return what came out."""
    assert not finish(start(folder, processes), PATIENCE, folder), "the run did not end in time"
    return json.loads((Path(folder) / "outcome.json").read_text())


def compare(folder, processes, alone):
    found = complete(folder, processes)
    return sorted(name for name in alone if found[name] != alone[name])


def at_points(out, processes, points):
    """Kill a run at each point, resume it, and say what differs."""
    alone = complete(out / "alone", processes)
    report = {}
    for point in points:
        folder = out / point.replace(":", "-")
        assert finish(start(folder, processes, point), PATIENCE, folder), f"{point} was not reached"
        report[point] = compare(folder, processes, alone)
    return report


def at_random(out, processes, kills, seed):
    """Kill runs, resumed ones too, until there were so many kills; each run ends in the end."""
    began = time.monotonic()
    alone = complete(out / "alone", processes)
    longest = time.monotonic() - began
    draw, folder, report, moments = random.Random(seed), out / "killed", {}, []
    while len(moments) < kills:
        seconds = draw.uniform(0.1, 0.9) * longest
        if finish(start(folder, processes), seconds, folder):
            moments.append(f"{seconds:.2f} s, {[path.name for path in checkpoints_in(folder)]}")
            print(moments[-1], flush=True)
            continue
        report[f"after {len(moments)} kills"] = differences_of(folder, alone)
        shutil.rmtree(folder)
    report[f"after {len(moments)} kills, the last"] = compare(folder, processes, alone)
    return report


def differences_of(folder, alone):
    found = json.loads((Path(folder) / "outcome.json").read_text())
    return sorted(name for name in alone if found[name] != alone[name])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--engine", default="ddp", help="of engines.py; needs its variables")
    parser.add_argument("--trainer", choices=[*TRAINERS, *PREFERENCES], default="rloo")
    parser.add_argument("--at", nargs="*", default=[])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"KILLED_ENGINE": given.engine, "KILLED_TRAINER": given.trainer}
    gc.freeze()  # otherwise each run has all that was imported looked through
    report = {}
    if given.at:
        report |= at_points(given.out, given.processes, given.at)
    if given.kills:
        report |= at_random(given.out, given.processes, given.kills, given.seed)
    print(json.dumps(report))
    sys.exit(any(report.values()))


if __name__ == "__main__":
    main()
