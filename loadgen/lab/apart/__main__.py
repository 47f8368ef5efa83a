"""Prefill and decode apart beside together, on the same GPUs: prints docs/apart.md's table.

    python -m loadgen.lab.apart ratios --rows FILE [--profile P] [--replicas N] [--plots docs]
    python -m loadgen.lab.apart figure8 --rows FILE

A row in FILE is not computed again.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from loadgen.lab.apart import figure8, ratios
from loadgen.lab.apart.kept import Kept
from loadgen.lab.apart.plots import draw
from loadgen.markdown import table
from loadgen.trials.parallel import run_all


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("ratios", "figure8"))
    parser.add_argument("--seed", type=int, action="append", help="default: 1")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals (30)")
    parser.add_argument("--profile", action="append", help="default: those of the page")
    parser.add_argument("--policy", action="append", help="default: those of the page")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path, required=True, help="a file that keeps the results")
    parser.add_argument("--plots", type=Path, help="draw a plot into this folder")
    args = parser.parse_args(argv)
    kept, seeds = Kept(args.rows), args.seed or [1]
    of = ratios if args.table == "ratios" else figure8
    cells = of.cells(args.profile, args.policy, seeds, args.seconds)
    done = dict(run_all([partial(of.fill, kept, cell) for cell in cells], args.jobs))
    found = [done[n] for n in range(len(cells))]
    print(table(of.HEADS, of.lines(cells, found)))
    if args.plots is not None and of is ratios:
        print(draw(cells, found, args.plots))


if __name__ == "__main__":
    main()
