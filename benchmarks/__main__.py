"""What `make bench` runs: the time of a step, and how the passes grow. The sweep and the zoo take longer.

`python -m benchmarks --quick` shows in seconds that they run; it measures nothing, and writes nothing.
`python -m benchmarks --write-docs` makes docs/cost.md of the results that are there, and measures nothing.
"""

import sys
from collections.abc import Sequence

from benchmarks import cost_docs, scale, step_time


def main(arguments: Sequence[str]) -> None:
    if list(arguments) == ["--write-docs"]:
        cost_docs.write()
        return
    step_time.main(arguments)
    scale.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
