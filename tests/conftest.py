"""Tests on several ranks run under a plain pytest: see mpirunner/__init__.py."""

import os
import tempfile

import pytest

# Tests are small: a second thread costs more than it helps, most of all where ranks outnumber cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The user's own state folder has the runs that he trained; tests leave nothing in it.
os.environ["XDG_STATE_HOME"] = os.path.join(
    tempfile.gettempdir(), f"distseg-tests-state-{os.getuid()}"
)

pytest_plugins = ("mpirunner.plugin", "covering")


# Tests compare with programs on the CPU, so a node's GPUs are hidden, unless DISTSEG_TEST_DEVICE asks for them.
DEVICE = os.environ.get("DISTSEG_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported


@pytest.fixture(autouse=True, scope="session")
def verify_on_device():
    """Let ``verify`` run its distributed steps on ``DISTSEG_TEST_DEVICE`` in tests that name no device.

    ``DISTSEG_TEST_DEVICE=cuda pytest tests/test_exact.py`` compares steps on GPUs with the serial program on the CPU.
    """
    if DEVICE == "cpu":
        return
    import torch

    from distseg.training.verify import verify

    device = torch.device(DEVICE)
    verify.__defaults__ = tuple(
        device if isinstance(value, torch.device) else value for value in verify.__defaults__
    )


@pytest.fixture
def refused(capsys):
    """``refused(*words)``: what is said of a command that is refused."""

    def said(*words: str) -> str:
        from distseg.cli.main import main

        with pytest.raises(SystemExit) as end:
            main([*words])
        assert end.value.code == 2
        return capsys.readouterr().err

    return said
