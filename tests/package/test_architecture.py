"""The page of the architecture says what the sources say."""

import sys

import pytest
from workspace import ROOT

sys.path.append(str(ROOT / "scripts"))

import architecture


def test_the_page_is_that_of_the_sources(capsys):
    assert architecture.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_page_is_told_and_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(architecture, "PAGE", tmp_path / "architecture.md")
    assert architecture.main(["--check"]) == 1
    assert "is stale: run python scripts/architecture.py" in capsys.readouterr().out
    assert architecture.main([]) == architecture.main(["--check"]) == 0
    (tmp_path / "architecture.md").write_text(architecture.page() + "more")
    assert architecture.main(["--check"]) == 1


def test_parts_stand_above_what_they_import():
    shown = architecture.picture({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert shown.splitlines()[1:-1] == ["2  a -> b, c", "1  b -> c", "0  c"]
    with pytest.raises(ValueError, match="import each other in a circle"):
        architecture.picture({"a": {"b"}, "b": {"a"}})


def test_a_guarantee_whose_files_are_gone_is_an_error(monkeypatch):
    monkeypatch.setitem(architecture.GUARANTEES, "x", ("gone.py", "tests/conftest.py"))
    with pytest.raises(FileNotFoundError, match=r"trl/gone\.py, which keeps or shows: x\."):
        architecture.guarantee_table()
