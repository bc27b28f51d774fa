import pytest
from online_runs import config
from tiny import tiny_model

from trl.trainer.base.setup_checks import check_run
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig


def test_options_of_another_trainer(tmp_path):
    with pytest.raises(TypeError, match="must be an instance of GRPOConfig, not of RLOOConfig"):
        check_run("model", config(tmp_path), GRPOConfig)
    assert check_run("model", config(tmp_path), RLOOConfig) is None


@pytest.mark.parametrize("loaded", [False, True])
def test_the_output_may_not_replace_the_model(tmp_path, loaded):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")
    given = model if loaded else f"{tmp_path}/model"
    with pytest.raises(ValueError, match="output_dir=.* is the folder of the model"):
        check_run(given, config(f"{tmp_path}/./model/"), RLOOConfig)
    assert check_run(given, config(tmp_path / "out"), RLOOConfig) is None


def test_a_path_that_leads_nowhere(tmp_path):
    (tmp_path / "smollm").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no such folder. Did you mean smollm?"):
        check_run(str(tmp_path / "smolm"), config(tmp_path / "out"), RLOOConfig)
    with pytest.raises(FileNotFoundError, match="'./nowhere/x': there is no such folder."):
        check_run("./nowhere/x", config(tmp_path / "out"), RLOOConfig)
