from trl.scripts import kto


def test_options_reach_their_dataclasses():
    words = ["--output_dir", "out", "--use_cpu", "--undesirable_weight", "1.5", "--beta", "0.2"]
    _, training, _, _ = kto.make_parser().parse_args_and_config(words)
    assert (training.undesirable_weight, training.beta, training.loss_type) == (1.5, 0.2, "kto")
