"""The expert MLP, the sum over experts of weight * down(silu(gate(x)) * up(x)), by backend."""
