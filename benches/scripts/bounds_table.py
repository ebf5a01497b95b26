"""Makes one table of what bounds.sh has measured: `bounds_table.py DIR OUT.csv SLOW_MB`, with lines `name|title` on standard input.

Never measures. Surprising fact: the bound of the processor is a run of its own, with all experts in memory, so that a sweep which computes
slowly because it reads cannot pass for one that is bound by computing. The slow drive's rate is the limit that was set: a probe of half a
second sees the burst that limits of this kind let through.
"""

import csv
import pathlib
import sys

# Bytes of one expert of the published shape in the recipe q2: what a miss must read.
EXPERT_BYTES = 9_953_280


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def number(row, column):
    return float(row[column] or 0)


def line(title, row, resident, limit):
    """One line of the table: rate, bounds, and what was read against what was missing."""
    tokens, ms, read = number(row, "prefill_tokens"), number(row, "prefill_ms"), number(row, "prefill_read_bytes")
    rate = number(row, "prefill_tps")
    compute = resident or tokens / (ms - number(row, "prefill_wait_ms")) * 1000
    cells = [title, f"{rate:.1f}", f"{compute:.1f}" if read else ""]
    rate_of_drive = limit or number(row, "drive_gb_per_s")
    if read and rate_of_drive:
        drive = tokens * rate_of_drive * 1e9 / read
        busy = number(row, "prefill_drive_ms")
        cells += [
            f"{drive:.1f}",
            f"{rate / min(drive, compute):.2f}",
            f"{read / 1e9:.2f}",
            f"{read / (number(row, 'prefill_misses') * EXPERT_BYTES):.3f}",
            f"{busy / ms:.0%}",
            f"{read / busy / 1e6:.3g} of {rate_of_drive:.3g}",
        ]
    else:
        cells += [""] * 6
    return "| " + " | ".join(cells) + " |"


def main():
    folder, out, slow = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) / 1000
    titles = [line.rstrip("\n").split("|", 1) for line in sys.stdin]
    found = {name: rows_of(folder / f"row-{name}.csv") for name, _ in titles if (folder / f"row-{name}.csv").exists()}
    print("| measurement | t/s | compute bound | drive bound | of the lower | GB read | of the missing | drive busy | GB/s while reading |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    every = []
    for name, title in titles:
        # The sweep that comes before an append is not what is asked.
        for row in found.get(name, [])[-1:]:
            twin = found.get(name.replace("streamed", "resident"), []) if name.startswith("streamed") else []
            limit = slow if name.startswith("slow") else None
            print(line(title, row, number(twin[0], "prefill_tps") if twin else None, limit))
            every.append({"measurement": name, **row})
    if every:
        with open(out, "w", newline="") as file:
            writer = csv.DictWriter(file, every[0].keys())
            writer.writeheader()
            writer.writerows(every)


main()
