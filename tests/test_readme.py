"""The README's Python snippets run."""

import re
import sys
from pathlib import Path

import pytest
import torch

from graphrt.cli import main

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"^```python( continue)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _programs() -> list[str]:
    """Snippets, those marked "continue" joined to the one before."""
    programs: list[str] = []
    for continues, code in _BLOCK.findall(README.read_text(encoding="utf-8")):
        if continues:
            programs[-1] += code
        else:
            programs.append(code)
    return programs


@pytest.mark.parametrize("number", range(len(_programs())))
def test_snippet_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(_programs()[number], f"README.md snippet {number}", "exec"), {"__name__": "readme"})
    if number == 0:
        printed = capsys.readouterr().out
        assert "values bitwise equal" in printed
        assert "operation" in printed or "kernel" in printed


def test_the_function_to_check_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (program for program in _programs() if "def make_trainer" in program)
    (tmp_path / "readme_train.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["check", "readme_train:make_trainer"]) == 0
    assert "can be captured" in capsys.readouterr().out


def test_readme_has_snippets() -> None:
    assert len(_programs()) >= 2
