"""Gives the package README.md as its description, without what only a checkout can show."""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"^!\[.*\n+", "", text, flags=re.MULTILINE)  # pictures
text = re.sub(r"\[([^\]]+)\]\((?!https://)[^)]+\)", r"\1", text)  # links to files
setup(long_description=text, long_description_content_type="text/markdown")
