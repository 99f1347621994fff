"""How long a training takes on a machine that `predict.py` has measured: `transformer summary` at the predicted speed.

python scripts/benchmark/predict.py --tokens 25000 --output rates.json
python scripts/benchmark/hours.py rates.json experiment=base train.precision=bf16
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from contest import fail
from speed import read_rates, step_work

from transformer.config.compose import compose_job
from transformer.errors import TransformerError
from transformer.tools.summary.command import format_summary, summarise
from transformer.tools.summary.job import SummaryJob


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rates", type=Path, help="what predict.py wrote on this machine")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the training")
    args = parser.parse_args(arguments)
    try:
        job = compose_job("summary", SummaryJob, args.overrides)
        speed = predicted_speed(args.rates, job)
        print(format_summary(summarise(replace(job, tokens_per_second=speed))), end="")
    except TransformerError as error:
        fail(error)


def predicted_speed(rates: Path, job: SummaryJob) -> float:
    """Target tokens a second in full steps. Raises InputError where the rates are of other steps."""
    summary = summarise(job)
    tokens = summary.flops.tokens_per_step
    work = step_work(
        job.model,
        summary.vocab_size,
        resolved=summary.resolved,
        source=tokens,
        target=tokens,
        mean_length=summary.flops.mean_length,
    )
    return tokens / read_rates(rates, summary.resolved, tokens_per_step=tokens).seconds(work)


if __name__ == "__main__":
    main(sys.argv[1:])
