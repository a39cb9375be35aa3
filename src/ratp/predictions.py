"""``predictions-*.csv``: what a run's final model says about domains that have no labels of their own."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from ratp.domain import UnlabelledDomain
from ratp.files import safe_name, write_text
from ratp.method import Method
from ratp.stream import Stream


def prediction_files(stream: Stream, folder: Path) -> dict[Path, UnlabelledDomain]:
    """The domains without labels, each with a file of its own."""
    found: dict[Path, UnlabelledDomain] = {}
    names: list[str] = []
    for domain in stream.unlabelled:
        plain = name = safe_name(domain.name)
        again = 1
        while name.lower() in names:  # some file systems know no case
            again += 1
            name = f"{plain}-{again}"
        names.append(name.lower())
        found[folder / f"predictions-{name}.csv"] = domain
    return found


def write_predictions(method: Method, stream: Stream, folder: Path) -> None:
    """Writes what a method says about every image of these domains, unless it is written already."""
    for path, domain in prediction_files(stream, folder).items():
        if path.exists():
            continue
        confidence, label = method.predict(domain.images).softmax(dim=1).max(dim=1)
        files = stream.files.get(domain.name) or [str(k) for k in range(len(domain))]
        rows = zip(files, label.tolist(), confidence.tolist(), strict=True)
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(("file", "class", "confidence"))
        writer.writerows((file, stream.classes[k], f"{share:.4f}") for file, k, share in rows)
        write_text(path, table.getvalue())
