"""Tests on several ranks run under a plain pytest: see mpirunner/__init__.py."""

import os

# Tests are small: a second thread costs more than it helps, most of all where ranks outnumber cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ("mpirunner.plugin",)
