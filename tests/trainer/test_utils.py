import torch
from torch.testing import assert_close

from trl.trainer import utils


def test_scores_of_logits():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3, 6], [1, 1, 2]])
    logps = (logits / 0.7).log_softmax(-1)
    found = utils.selective_log_softmax(logits, ids, temperature=0.7)
    assert_close(found, logps.gather(2, ids[:, :, None])[:, :, 0])
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(utils.entropy_from_logits(logits), expected)
