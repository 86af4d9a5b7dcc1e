"""The version of this package, and of its JSON documents."""

__version__ = "0.2.0"
SCHEMA = 1
