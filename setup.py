from setuptools import setup

setup()  # everything is in pyproject.toml; tools and people look for this file
