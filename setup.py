"""What `pyproject.toml` cannot say: where the folder `configs` goes, and how `pip install -e` adds fiddlex to Python.

The folder `configs` is the folder `fiddlex/configs` of an installed package, and stays where it is in a checkout.
"""

import setuptools
from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Adds the checkout to Python's path.

    Otherwise setuptools adds an import hook, for the sake of `fiddlex.configs`. Python asks a hook last, so it would
    take a checkout named `fiddlex` in the current folder for the package.
    """

    def finalize_options(self) -> None:
        """Leaves out `fiddlex.configs`, so that all packages lie below the checkout as their names say."""
        self.distribution.packages.remove("fiddlex.configs")
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


setuptools.setup(
    packages=[
        *setuptools.find_namespace_packages(include=["fiddlex", "fiddlex.*"], exclude=["*.__pycache__"]),
        "fiddlex.configs",
    ],
    package_dir={"fiddlex.configs": "configs"},
    cmdclass={"editable_wheel": EditableWheel},
)
