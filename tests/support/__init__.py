"""What several test files share.

pyproject.toml puts the folder above on the path: `from support.corpora import run`.
"""
