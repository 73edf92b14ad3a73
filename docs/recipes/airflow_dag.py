"""Airflow: the report's notebook by PapermillOperator, then its verdict by exit code.

Needs apache-airflow-providers-papermill beside Airflow, and the lab's kernel where the worker runs:
`.venv/bin/python -m ipykernel install --user --name eaglelab`. A papermill task is green even when cells were
skipped, so the second task decides: it fails unless the records are whole and the verdict is healthy.
"""

import os
from datetime import datetime, timedelta

from airflow.providers.papermill.operators.papermill import PapermillOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

CHECKOUT = os.environ.get("EAGLELAB_CHECKOUT", "/opt/eaglelab")
RUN = os.environ.get("EAGLELAB_RUNS", "/var/lib/eaglelab/runs") + "/{{ ts_nodash }}"

with DAG(
    "eaglelab_report",
    schedule="20 3 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"execution_timeout": timedelta(hours=1)},
):
    # The key comes from EAGLELAB_API_KEY in the worker's environment: never from a parameter, which papermill
    # writes into the notebook.
    report = PapermillOperator(
        task_id="report",
        input_nb=f"{CHECKOUT}/notebooks/regression_report.ipynb",
        output_nb=RUN + ".ipynb",
        kernel_name="eaglelab",
        language_name="python",
        parameters={
            "server": os.environ.get("EAGLELAB_SERVER", "http://127.0.0.1:30000"),
            "drafter": os.environ.get("EAGLELAB_DRAFTER", "/models/drafter"),
            "out": RUN,
        },
    )
    verdict = BashOperator(
        task_id="verdict",
        bash_command=f"{CHECKOUT}/.venv/bin/eaglelab export {RUN} --to markdown --exit-code",
        append_env=True,
    )
    report >> verdict
