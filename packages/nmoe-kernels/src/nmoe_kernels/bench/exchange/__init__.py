"""`nmoe-kernels bench rdep`: dispatch and combine by transport, beside all-to-all, by torchrun."""
