import re
from pathlib import Path

import repro.data


def test_the_example_on_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(repro.data.__file__).with_name("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
