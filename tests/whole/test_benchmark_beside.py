"""`benchmarks.beside` compares the same times of two checkouts."""

from pathlib import Path

import pytest

from benchmarks import beside


def test_times_are_named_by_the_path_to_them_and_counts_are_left_out() -> None:
    steps = {"results": {"mlp": {"milliseconds": {"sgd": {"plain": 2.0}}, "MB": {"sgd": 5.0}, "ratios": {"1,10": 1.0}}}}
    assert dict(beside.times(steps)) == {"mlp, sgd, plain": 2.0}
    host = {"results": {"chain": {"parameters": 3, "milliseconds": [{"method": "adamw", "step": 4.0}]}}}
    assert dict(beside.times(host)) == {"chain, adamw, step": 4.0}
    compiled = {"python": "3.11", "CPU seconds": [{"model": "vit", "nodes": 9, "capture": 1.5}]}
    assert dict(beside.times(compiled)) == {"vit, capture": 1.5}


def test_rounds_alternate_and_rows_of_one_commit_only_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Path("old"), Path("new")
    calls: list[Path] = []
    results = {old: iter((1.0, 9.0, 2.0)), new: iter((3.0, 1.0, 4.0))}

    def measured(checkout: Path, benchmark: str, options: object, python: str) -> dict[str, float]:
        calls.append(checkout)
        return {"step": next(results[checkout]), **({"gone": 1.0} if checkout == old else {})}

    monkeypatch.setattr(beside, "measured", measured)
    rows = beside.compare(old, new, ["step_time"], rounds=3, python="python3")
    assert calls == [old, new] * 3
    assert rows == [{"time": "step", "old": 2.0, "new": 3.0, "new / old": 1.5}]
