"""The same sweep on a cluster, through Ray: the same processes, the same records.

Each run is a task that starts the very process a run has on one machine, so its record has the same
bits. It works below the same path on its node; what it wrote comes back and is written here, so
nodes need not share a disk. Where they do, a sweep that was stopped goes on from its checkpoints,
whichever node a run had and gets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bestta.benchmark.config import Run
from bestta.benchmark.sweep import Job, Listener, Silent, StopSwitch, drive, noted_signals
from bestta.files import write_whole
from bestta.models import names as model_names

POLL_SECONDS = 0.5


def sweep_on_ray(
    jobs: Sequence[Job], out: Path, *, address: str | None = None, listener: Listener | None = None
) -> None:
    """Do what is waiting on a Ray cluster, as many at once as it has room for.

    Args:
        jobs: What `jobs_of` made.
        out: Where records go: here, and on each node below the same path.
        address: The cluster's; by default the one this machine belongs to, or a new one of its own.
        listener: Shown how it goes.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("--on ray needs Ray: pip install 'bestta[cluster]'") from error
    listener = listener or Silent()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begun_here = not ray.is_initialized()
    if begun_here:
        ray.init(
            address=address,
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    try:
        _sweep(ray, [job for job in jobs if job.state == "waiting"], out, listener)
    finally:
        if begun_here:
            ray.shutdown()


def _sweep(ray: Any, waiting: list[Job], out: Path, listener: Listener) -> None:
    mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
    task = ray.remote(max_retries=0)(_task)
    under_way: dict[Any, Job] = {}
    for number, job in enumerate(waiting):
        gpus = 1 if job.run.device.startswith("cuda") else 0
        room = task.options(num_cpus=job.run.threads, num_gpus=gpus, name=job.name)
        text = with_absolute_paths(job.run).to_json()
        forgotten = job.name if job.again else ""
        under_way[room.remote(number, text, str(out), mailbox, forgotten)] = job
    heeded = 0
    with noted_signals() as signals:
        while under_way:
            done, _ = ray.wait(list(under_way), num_returns=1, timeout=POLL_SECONDS)
            for number, said in ray.get(mailbox.take.remote()):
                job = waiting[number]
                if job.state == "waiting":
                    job.state = "running"
                    listener.begun(job)
                listener.said(job, said)
            for reference in done:
                _end(ray, reference, under_way.pop(reference), out, listener)
            if len(signals) > 1:
                break  # their processes end by themselves when nobody listens any more
            if len(signals) > heeded:
                heeded = len(signals)
                ray.get(mailbox.stop.remote())
                listener.stopping()
    if signals:
        raise KeyboardInterrupt


def with_absolute_paths(run: Run) -> Run:
    """The same run for a process that was started in another folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    model = run.protocol.model
    if model not in model_names():
        model = str(Path(model).absolute())
    return replace(
        run,
        data=absolute(run.data),
        source_data=absolute(run.source_data),
        protocol=replace(run.protocol, model=model),
    )


def _end(ray: Any, reference: Any, job: Job, out: Path, listener: Listener) -> None:
    if job.state == "waiting":
        listener.begun(job)
    try:
        last, files = ray.get(reference)
        for name, data in files.items():
            place = out / name
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, data)
        job.hear(last)
    except (ray.exceptions.RayError, OSError) as error:  # OSError: of writing it here
        lines = str(error).strip().splitlines()
        job.hear({"failed": lines[-1] if lines else type(error).__name__, "trace": str(error)})
    listener.ended(job)


class Mailbox:
    """What runs on other nodes say, until it is taken; and whether they are to stop."""

    def __init__(self) -> None:
        self.latest: dict[int, dict[str, Any]] = {}
        self.others: list[tuple[int, dict[str, Any]]] = []
        self.stopping = False

    def put(self, number: int, said: dict[str, Any]) -> None:
        """Leave a letter; of those that tell how far a run is, the last one counts."""
        if "at" in said:
            self.latest[number] = said
        else:
            self.others.append((number, said))

    def is_stopping(self) -> bool:
        """Whether they are to stop."""
        return self.stopping

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """All that came since the last time."""
        taken = [*self.others, *self.latest.items()]
        self.latest, self.others = {}, []
        return taken

    def stop(self) -> None:
        """Have all of them stop."""
        self.stopping = True


def _task(
    number: int, text: str, out: str, mailbox: Any, forgotten: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """On a node: do the run, and bring back its last word and the files of its record.

    ``forgotten`` names a record that shall not count, though this node may have it.
    """
    import ray

    if ray.get(mailbox.is_stopping.remote()):
        return {"stopped": "stopped before it began"}, {}
    mailbox.put.remote(number, {"node": ray.get_runtime_context().get_node_id()})
    place = Path(out)
    place.mkdir(parents=True, exist_ok=True)
    if forgotten:
        (place / f"{forgotten}.json").unlink(missing_ok=True)
    switch = StopSwitch()
    last: dict[str, Any] = {}
    over = threading.Event()

    def say(said: dict[str, Any]) -> None:
        last.clear()
        last.update(said)
        mailbox.put.remote(number, said)

    def look() -> None:
        while not over.wait(POLL_SECONDS):
            if ray.get(mailbox.is_stopping.remote()):
                switch.flip()
                return

    threading.Thread(target=look, daemon=True).start()
    try:
        drive(text, place, say, switch)
    finally:
        over.set()
    files = {}
    if "record" in last:
        record = Path(last["record"])
        # The record last: what it names is there when it is.
        for path in (*sorted(record.with_suffix(".pictures").glob("*")), record):
            files[str(path.relative_to(place))] = path.read_bytes()
    return last, files
