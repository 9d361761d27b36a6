"""Fixtures of the end-to-end tests."""

from e2e_support import nmoe_train, text_folder

__all__ = ["nmoe_train", "text_folder"]
