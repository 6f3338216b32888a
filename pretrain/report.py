"""What a pre-training run prints at its end."""

from __future__ import annotations

from pathlib import Path

from ibot_eval.record import EvalRecord


def summary(record: EvalRecord, folder: Path) -> str:
    """Figures of the last step and epoch, and what to do with the run's folder."""
    config = record.config
    lines = [
        f"pretrain {config['arch']}/{config['patch_size'] or ''} on {config['data']}: ".replace("/ ", " ")
        + ("finished" if record.status == "success" else (record.error or {}).get("message", record.status)),
        "",
    ]
    for metric in record.metrics:
        unit = "" if metric["unit"] == "1" else metric["unit"]
        lines.append(f"{metric['name']:<22} {metric['value']:.4g} {unit}".rstrip())
    lines += ["", *(f"warning: {warning}" for warning in dict.fromkeys(record.warnings))]
    # Only what was opened as labelled train and test splits is known to serve.
    data = config["data"] if "test" in (record.data["splits"] or {}) else "LABELLED_FOLDER"
    lines += [
        f"record: {folder / 'record.json'}",
        f"curves: ibot-eval plot {folder}",
        f"evaluate: ibot-eval knn --ckpt {folder} --data {data}",
    ]
    return "\n".join(lines)
