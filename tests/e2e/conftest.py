"""Fixtures of the end-to-end tests."""

from commands import nmoe_train, text_folder

__all__ = ["nmoe_train", "text_folder"]
