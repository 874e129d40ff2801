import re
from pathlib import Path

import pytest

import repro.train


@pytest.mark.usefixtures("quick_compile")
def test_the_examples_on_the_page_run(capsys):
    page = Path(repro.train.__file__).with_name("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert len(blocks) == 2 and (first, second) == ("(30, 8)", "(30, 8, 1, 2)")
    assert len(names["scalars"]) == 8 and names["scalars"][0]["loss"] == float(names["result"].final["loss"][0])
    assert float(names["metrics"]["loss"]) > 0
