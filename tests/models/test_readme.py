import re
from pathlib import Path

import repro.models


def test_the_examples_on_the_page_run(quick_compile):
    page = Path(repro.models.__file__).with_name("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
