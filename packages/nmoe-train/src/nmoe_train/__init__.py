"""Trains Mixture-of-Experts language models from one TOML file."""
