"""What pyproject.toml cannot say: the readme of the package, whose links lead into the repository."""

from pathlib import Path
from runpy import run_path

from setuptools import setup

setup(
    long_description=run_path(str(Path(__file__).with_name("docs") / "site_links.py"))["package_readme"](),
    long_description_content_type="text/markdown",
)
