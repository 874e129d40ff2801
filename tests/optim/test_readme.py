import re
from pathlib import Path

import repro.optim


def test_the_examples_on_the_page_run(quick_compile):
    page = Path(repro.optim.__file__).with_name("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "q (2, 16, 4, 8) matrix: Muon on 8 of 16 x 8" in names["describe"](names["params"], names["layouts"])
