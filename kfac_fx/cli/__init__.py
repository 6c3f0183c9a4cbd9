"""The `kfac-fx` command."""

from kfac_fx.cli.command import main

__all__ = ["main"]
