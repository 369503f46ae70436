"""Medians of what bench.sh printed: table.py FILE..."""
import collections, statistics, sys

rows = collections.defaultdict(lambda: collections.defaultdict(list))
for line in (line for name in sys.argv[1:] for line in open(name)):
    words = line.split()
    if len(words) == 3 and words[0] in ("kernel", "mount", "spike"):
        rows[words[1]][words[0]].append(float(words[2]))
    elif "FAILED" in line:
        print(line.rstrip())
print("| | kernel | mount | spike | mount/kernel | spike/kernel | mount/spike |")
for label, row in rows.items():
    k, m, s = (statistics.median(row[which]) if row[which] else float("nan") for which in ("kernel", "mount", "spike"))
    print(f"| {label} | {k:g} | {m:g} | {s:g} | {m / k:.2f} | {s / k:.2f} | {m / s:.2f} |", {w: sorted(v) for w, v in row.items()})
