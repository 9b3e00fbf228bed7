"""The recipes of docs/recipes, as a user starts them: alone and under mpirun."""

from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "docs/recipes"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_plain_loop_computes_one_loss_on_any_number_of_ranks(mpirun):
    found = set()
    for ranks in (1, 2, 4):
        done = mpirun(ranks, "plain_loop.py", cwd=RECIPES)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.split("logits")[0].strip())
        assert "logits (1, 2, 301, 437)" in done.stdout
    assert len(found) == 1 and found.pop().startswith("loss 0.")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["dataset", "sampler", "lightning_module"])
def test_recipes_train_on_groups_of_ranks(mpirun, name):
    done = mpirun(2, f"{name}.py", cwd=RECIPES)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines() if line.replace(".", "").isdigit()]
    assert len(losses) == 2 and losses[0] == losses[1], done.stdout


@pytest.mark.slow
def test_the_notebook(tmp_path, mpirun):
    done = mpirun(1, RECIPES / "notebook.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[0:" in done.stdout


def test_recipes_are_short():
    for path in RECIPES.glob("*.py"):
        lines = path.read_text().splitlines()
        code = [
            line for line in lines if line.strip() and not line.strip().startswith(("#", '"""'))
        ]
        assert len(code) <= 40, path
