"""What `pyproject.toml` cannot say: the folder `configs` is the folder `fiddlex/configs` of an installed package."""

import setuptools

setuptools.setup(
    packages=[
        *setuptools.find_namespace_packages(include=["fiddlex", "fiddlex.*"], exclude=["*.__pycache__"]),
        "fiddlex.configs",
    ],
    package_dir={"fiddlex.configs": "configs"},
)
