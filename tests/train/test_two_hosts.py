"""Refused network namespaces skip a test; anything else that fails there is a failure."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from split_network import NotPermitted, two_hosts

pytestmark = pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` command")
NOBODY = 65534


def test_namespaces_that_a_user_may_not_make_are_told_as_that(fork: Callable[..., Any]) -> None:
    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        with pytest.raises(NotPermitted), two_hosts(f"nmoe{os.getpid()}"):
            pass
        sys.stdout.write("refused")

    assert fork(as_nobody).wait() == (0, "refused", "")


def test_any_other_failure_is_none_of_permission() -> None:
    with (
        pytest.raises(subprocess.CalledProcessError) as caught,
        two_hosts("no/name/of/a/namespace"),
    ):
        pass
    assert "no/name/of/a/namespace-0" in str(caught.value)
    assert caught.value.__notes__[0]
