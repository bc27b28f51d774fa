import peft
import pytest

from trl import import_utils


def test_packages_are_looked_up_when_asked_for():
    from trl.import_utils import is_math_verify_available, is_peft_available

    assert is_peft_available() is True and is_math_verify_available() is True
    assert import_utils.is_surely_absent_available() is False
    with pytest.raises(ImportError):
        from trl.import_utils import peft_available  # noqa: F401


def test_a_package_may_be_too_old():
    from trl.import_utils import is_liger_kernel_available, is_peft_available, is_yaml_available

    assert is_peft_available(min_version="0.1") is True
    assert is_peft_available("0.10.0") is True, "0.10 is newer than 0.9"
    assert is_peft_available(min_version=peft.__version__) is True
    assert is_peft_available(min_version="99.0") is False
    assert is_yaml_available(min_version="5.0") is True, "its distribution is called PyYAML"
    assert is_yaml_available(min_version="99") is False
    assert is_liger_kernel_available(min_version="99.0") is False
    assert import_utils.is_surely_absent_available(min_version="0.1") is False
    with pytest.raises(ValueError, match="min_version='new' must be a version, such as '1.2'"):
        is_peft_available(min_version="new")
