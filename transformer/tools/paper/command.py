"""`transformer table`: makes the table that the job asks for, writes its files, and gives its text.

table=1             -> layer_table             counted and timed; nothing is trained
a folder of runs    -> tables.runs             measured; nothing is trained
table=scores        -> rows, score_study       trained, measured, and studied
table=2, 3          -> rows, conclusions       trained and measured, beside the paper's figures
a file of rows      -> tables.rows             trained and measured
"""

from transformer.distributed import is_rank0
from transformer.tools.paper.conclusions import format_conclusions
from transformer.tools.paper.layer_table import format_layers, make_layer_table, write_layer_table
from transformer.tools.paper.rows import published_rows, score_rows
from transformer.tools.paper.score_study.format import format_study, write_study
from transformer.tools.paper.score_study.study import study_scores
from transformer.tools.significance import resampling_seed
from transformer.tools.tables.format import format_markdown, write_table
from transformer.tools.tables.job import PAPER_TABLES, SCORES, TableJob
from transformer.tools.tables.make import make_table
from transformer.tools.tables.rows import Rows, is_folder, output_of, rows_of_file
from transformer.tools.tables.runs import make_run_table


def table(job: TableJob) -> tuple[str, list[Exception]]:
    """Make the table, write it, and return its text, which only rank 0 has, and the errors of the rows that failed.

    Raises what `rows_of`, `make_table`, `make_layer_table` and `make_run_table` raise.
    """
    resampling_seed()  # a bad one is refused before any row is trained
    if job.table == "1":
        layers = make_layer_table(job)
        write_layer_table(output_of(job), layers)
        return format_layers(layers), []

    errors: list[Exception] = []
    if is_folder(job):
        made = make_run_table(job)
    else:
        made, errors = make_table(job, rows_of(job))
    if not is_rank0():
        return "", errors

    if job.table == SCORES:
        study, study_errors = study_scores(job, made)
        write_study(output_of(job), study)
        return format_study(study), [*errors, *study_errors]
    text = format_markdown(made) + format_conclusions(made)
    write_table(output_of(job), made, text)
    return text, errors


def text_of(made: tuple[str, list[Exception]]) -> str:
    """The table, for people: it shows what did work."""
    return made[0]


def require_rows(made: tuple[str, list[Exception]]) -> None:
    """Raise the first error of a row that failed, if any did."""
    for error in made[1]:
        raise error


def rows_of(job: TableJob) -> Rows:
    """The rows that are to be trained. Raises InputError for an unknown or a bad row, or a file that cannot be read."""
    if job.table == SCORES:
        return score_rows(job)
    if job.table in PAPER_TABLES:
        return published_rows(job)
    return rows_of_file(job)
