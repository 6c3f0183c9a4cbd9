"""The benchmarks of `make bench`: times of a step, its parts, the default and the host, growth of passes. The sweep and
the zoo take longer.

`python -m benchmarks --quick` shows in seconds that they run; it measures nothing, and writes nothing.
`python -m benchmarks --write-docs` makes docs/cost.md of the results that are there, and measures nothing.
"""

import sys
from collections.abc import Sequence

from benchmarks import cost_docs, default_step, host_time, scale, step_parts, step_time


def main(arguments: Sequence[str]) -> None:
    if list(arguments) == ["--write-docs"]:
        cost_docs.write()
        return
    for benchmark in (step_time, default_step, step_parts, host_time, scale):
        benchmark.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
