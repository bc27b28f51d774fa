from trl.scripts import reward


def test_options_reach_their_dataclasses():
    words = ["--output_dir", "out", "--use_cpu", "--center_rewards_coefficient", "0.1"]
    script, training, _, _ = reward.make_parser().parse_args_and_config(words)
    assert (training.center_rewards_coefficient, training.learning_rate) == (0.1, 1e-4)
    assert training.disable_dropout and script.dataset_train_split == "train"
