import re
from pathlib import Path

import numpy as np

import repro.quant


def test_the_examples_on_the_page_run(quick_compile):
    page = Path(repro.quant.__file__).with_name("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["gradient"].shape == (256, 64) and np.isfinite(names["gradient"]).all()
    assert names["q"].scale.shape == (4, 8) and str(names["q"].codes.dtype) == "float8_e4m3fn"
    mentioned = [name for name in (*repro.quant.RECIPES, *repro.quant.__all__) if not name.startswith("mx")]
    assert [name for name in (*mentioned, *repro.quant.FORMATS) if name not in page] == []
