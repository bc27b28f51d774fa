import pytest
import torch

from trl.ops.matmul_precision import highest_matmul_precision, matmul_precision_kept

CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
needs_settings = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has the old setting only"
)


@pytest.fixture(autouse=True)
def untouched():
    with matmul_precision_kept():
        yield


def settings():
    """What products use: by the old setting, if it can be read, and by device."""
    try:
        for_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        for_all = "not readable"
    return for_all, CUDA.fp32_precision, CPU.fp32_precision


def tf32_everywhere():
    torch.backends.fp32_precision = "tf32"  # as transformers does for tf32=True


def medium():
    torch.set_float32_matmul_precision("medium")


def tf32_for_cuda():
    CUDA.fp32_precision = "tf32"


@needs_settings
@pytest.mark.parametrize("change", [lambda: None, medium, tf32_for_cuda, tf32_everywhere])
def test_the_highest_precision_is_set_inside_alone(change):
    try:
        change()
        before = settings()
        for _ in range(2):
            with highest_matmul_precision():
                assert settings() == ("highest", "ieee", "ieee")
                assert not CUDA.allow_tf32
            assert settings() == before
        with pytest.raises(KeyError), highest_matmul_precision():
            raise KeyError
        assert settings() == before
    finally:
        torch.backends.fp32_precision = "none"


@needs_settings
def test_what_was_left_to_all_operations_stays_so():
    """A later choice for all operations still counts for products."""
    try:
        with highest_matmul_precision():
            pass
        tf32_everywhere()
        assert CUDA.fp32_precision == "tf32"
        with matmul_precision_kept():
            torch.set_float32_matmul_precision("highest")
        assert CUDA.fp32_precision == "tf32"
        torch.backends.fp32_precision = "none"
        assert CUDA.fp32_precision == "none"
    finally:
        torch.backends.fp32_precision = "none"
