"""How the tests call the command."""

from __future__ import annotations

import pytest

from preftune.cli import main


def run(capsys, *arguments):
    """Exit code, standard output and standard error of `preftune ARGUMENTS`."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def turn(role, content):
    return {"role": role, "content": content}
