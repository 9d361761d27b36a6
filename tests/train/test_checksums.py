"""Checksums of gradients: any bit shows, and the odd one out is named."""

import torch
from nmoe_train.parallel.checksums import checksum, odd_places


def test_any_bit_of_any_tensor_and_their_order_change_the_checksum() -> None:
    tensors = [torch.randn(5, 3), torch.randn(7)]
    before = int(checksum(tensors))
    for tensor in tensors:
        for bit in (0, 12, 31):
            view = tensor.view(-1)[2:3].view(torch.int32)
            flip = torch.tensor([-(2**31) if bit == 31 else 1 << bit], dtype=torch.int32)
            view.bitwise_xor_(flip)
            assert int(checksum(tensors)) != before
            view.bitwise_xor_(flip)
    assert int(checksum(tensors)) == before
    assert int(checksum(tensors[::-1])) != before


def test_the_odd_one_is_named_and_of_two_both() -> None:
    assert odd_places([4, 4, 4, 4]) == []
    assert odd_places([4, 4, 5, 4]) == [2]
    assert odd_places([4, 5]) == [0, 1]
    assert odd_places([4, 4, 5, 5]) == [0, 1, 2, 3]
    assert odd_places([3]) == []
