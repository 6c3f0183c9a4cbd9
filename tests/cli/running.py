"""Run a command as the shell does."""

import pytest

from kfac_fx import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr), whether the status is returned or argparse exits with it."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out, shown.err
