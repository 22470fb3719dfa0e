"""Several processes on one store: kills, two hosts, speed, memory per rank, and the rates of a plan.

- kills: ranks and agents of torchrun are killed at random moments, and another number of ranks resumes.
- hosts: two network namespaces act as two hosts; one is lost and comes back.
- speed: featurizing with one and with two processes alternately, one thread each.
- memory: growth of the memory of a rank, for three numbers of rows and three of ranks.
- rates: the rates for the plan of large runs (docs/scale.md): gram matrices, factorisations, scores, top rows,
  claims.

benchmarks/results/scale_out.json stores each part beside the others, if they were measured on the same machine.

Run:  python -m benchmarks.scale_out kills [--rounds 20] [--seed 0]
      python -m benchmarks.scale_out speed      (on an otherwise idle machine)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.measuring import RESULTS, parser_of, save_parts, surroundings
from benchmarks.scaling import hosts, kills, memory, rates, speed

PARTS = {"kills": kills, "hosts": hosts, "speed": speed, "memory": memory, "rates": rates}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        part = parts.add_parser(name, description=module.__doc__)
        part.add_argument("--out", type=Path, default=RESULTS / "scale_out.json", help="where figures go")
        module.add_arguments(part)
    return parser.parse_args()


def main() -> int:
    """Measure one part; the exit status is 1 if a guarantee was broken."""
    options = arguments()
    found = PARTS[options.part].run(options)
    save_parts(options.out, surroundings(), {options.part: found})
    return 1 if found.get("broken") else 0


if __name__ == "__main__":
    sys.exit(main())
