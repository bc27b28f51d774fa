import pytest

from trl import import_utils


def test_packages_are_looked_up_when_asked_for():
    from trl.import_utils import is_math_verify_available, is_peft_available

    assert is_peft_available() is True and is_math_verify_available() is True
    assert import_utils.is_surely_absent_available() is False
    with pytest.raises(ImportError):
        from trl.import_utils import peft_available  # noqa: F401
