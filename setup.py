"""Package metadata. Settings of the tools are in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages, setup

here = pathlib.Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "megapipe" / "__init__.py").read_text()).group(1)

extras = {
    "examples": ["rich>=13", "numpy"],
    "viz": ["rich>=13", "matplotlib>=3.8", "plotly>=5.20"],
    "safetensors": ["safetensors>=0.4"],
    "transformers": ["transformers>=5.23", "safetensors>=0.4"],
    "models": ["transformers>=5.23", "datasets", "peft", "accelerate", "safetensors>=0.4"],
    "te": ["transformer-engine[pytorch]"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.5",
        "rich>=13",
        "numpy",
        "matplotlib>=3.8",
        "plotly>=5.20",
        "safetensors>=0.4",
        "transformers>=5.23",
    ],
    "megatron": ["megatron-core==0.16.1"],
    "bench": ["megatron-core==0.16.1", "dualpipe==1.0.0"],
    "lint": ["ruff>=0.9", "mypy>=1.14"],
}

setup(
    name="megapipe",
    version=version,
    description="Pipeline-parallel training for PyTorch, the Megatron way: one hand-written function per schedule",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megapipe", "megapipe.*"]),
    package_data={"megapipe": ["py.typed"]},
    install_requires=["torch>=2.6"],
    extras_require=extras,
    entry_points={"console_scripts": ["megapipe = megapipe.analysis.cli:main"]},
)
