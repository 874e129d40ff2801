"""Two CPU devices for every test, and programs that are compiled once per session, also across xdist workers."""

import contextlib
import functools
import gc
import os
import tempfile
from pathlib import Path

import pytest

# Set before JAX starts; child processes inherit all of it.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

# Tracing makes many objects that live on, and a tenth of the time went into looking through them for cycles.
gc.set_threshold(50_000, 20, 50)


def pytest_configure(config):
    # JAX writes cache files in place, so a worker may meet half of one; it says so and compiles by itself.
    config.addinivalue_line("filterwarnings", "ignore:Error (read|writ)ing persistent compilation cache entry")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="repro-compiled-", ignore_cleanup_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


@functools.cache
def _without_fusion_emitters():
    """Whether compile options can be changed so that programs with few optimisations take half the time: without XLA's
    fusion emitters, which older versions let one leave out. `False` where they cannot."""
    import jax
    from jax._src import compiler

    options = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return False
    found_by = compiler.get_compile_options

    def with_options(*args, **kwargs):
        found = found_by(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations") and not _emitters:
            found.env_option_overrides = [*found.env_option_overrides, *options.items()]
        return found

    compiler.get_compile_options = with_options
    return True


_emitters = []
"""Holds something while a test wants XLA's fusion emitters."""


@contextlib.contextmanager
def _quickly():
    import jax

    _without_fusion_emitters()
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def quick_compile():
    """Programs compiled with few optimisations: a third of the time, for tests of everything but the compiler."""
    with _quickly():
        yield


@contextlib.contextmanager
def _emitting():
    _emitters.append(True)
    yield
    _emitters.pop()


@pytest.fixture(scope="session")
def fusion_emitters():
    """`with fusion_emitters():` within `quick_compile`: with them XLA rounds the same in different programs, for tests
    of equal bits."""
    return _emitting


@pytest.fixture(scope="module")
def quick_compile_module():
    """`quick_compile` for a whole module, so that it holds for fixtures of that scope too."""
    with _quickly():
        yield


@pytest.fixture
def command(capsys):
    """`command(*words) -> (exit code, standard output, standard error)` of the `repro` command, in this process."""
    from repro.cli import main

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def refused(command):
    """`refused(*words) -> message`: checks that a command ends in one sentence and exit code 2."""

    def call(*words):
        code, _, err = command(*words)
        assert code == 2 and err.startswith("repro: ") and err.endswith("\n") and err.count("\n") == 1, err
        assert "Traceback" not in err
        return err.removeprefix("repro: ").strip()

    return call


TOY = Path(__file__).parent / "toy"
"""A working directory whose folder `experiments` holds `race`, which trains one structure in a second."""


@pytest.fixture
def toy(monkeypatch):
    """The experiment `race`, known to every command of this test."""
    from repro import catalogue

    monkeypatch.chdir(TOY)
    return catalogue.load("race")


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """The folder of one finished run of `race`; copy it before changing anything."""
    from repro.cli import main

    folder = tmp_path_factory.mktemp("toy") / "run"
    with pytest.MonkeyPatch.context() as patch, _quickly():
        patch.chdir(TOY)
        assert main(["run", "race", "--preset", "smoke", "--out", str(folder)]) == 0
    return folder
