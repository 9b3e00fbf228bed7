"""Everything about the package stands in pyproject.toml; `make setup` installs it."""

from setuptools import setup

setup()
