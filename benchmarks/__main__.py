"""What `make bench` runs: the time of a step, and how the passes grow. The sweep and the zoo take longer."""

from benchmarks import scale, step_time

step_time.main([])
scale.main([])
