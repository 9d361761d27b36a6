"""Trains Mixture-of-Experts language models from one TOML file."""

__version__ = "0.1.0"
