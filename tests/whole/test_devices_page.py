"""The script of docs/devices.md runs on two processes as a user starts it, ends in the middle, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.whole.test_docs import BLOCK, ROOT

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # in the command of the page
STOP = 3  # the step in which the second process ends, at the first start
ENDING = f"""
import os

import kfac_fx

take_step = kfac_fx.KFAC.step


def step_or_end(self, *args, **kwargs):
    if self.counter == {STOP} and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    return take_step(self, *args, **kwargs)


kfac_fx.KFAC.step = step_or_end
"""


@pytest.mark.slow
def test_the_script_of_the_page_goes_on_after_a_process_has_ended(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    assert f"{VARIABLE}=1 torchrun --nproc-per-node 2" in page
    script = tmp_path / "train.py"
    script.write_text("\n".join([ENDING, *(block["code"] for block in BLOCK.finditer(page))]), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "--max-restarts", "1", script.name],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{8 - STOP} of 8 steps, 0 skipped"]
    whole = sorted(file.parent.name for file in tmp_path.glob("checkpoints/*/.metadata"))
    assert whole == [f"{step:06}" for step in range(1, 9)]
