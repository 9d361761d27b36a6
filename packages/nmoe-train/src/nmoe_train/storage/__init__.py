"""Checkpoint folders as files, here and in a bucket; without torch, so a helper starts fast."""
