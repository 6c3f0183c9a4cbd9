"""Holders notice what is changed in place, and undo it."""

from __future__ import annotations

from kfac_fx.passes.tracing.holders import Entries


class Registry(dict[str, float]):
    """As those of transformers, whose `get` has other arguments."""

    def get(self, key: str) -> float:  # type: ignore[override]
        return super().get(key) or 0.0


def test_a_dictionary_may_have_another_get() -> None:
    registry = Registry(a=1.0)
    holder = Entries(registry, ["a", "b"], 1)
    assert holder.values[0] == 1.0 and holder.same()
    registry["a"] = 2.0
    assert not holder.same()
    holder.put_back()
    assert registry == {"a": 1.0}
