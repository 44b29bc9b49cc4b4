"""Merge the results of the benchmark scripts into one file and print them as a table.

    python benchmarks/table.py FOLDER_OF_JSON MERGED.json

Each script writes ``{"benchmark": name, "machine": {…}, "rows": [{"name", "median", "p99", "unit",
…}]}``; see harness.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> int:
    folder, merged = Path(sys.argv[1]), Path(sys.argv[2])
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    merged.write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        print(f"{result['benchmark']}")
        width = max((len(row["name"]) for row in result["rows"]), default=0)
        for row in result["rows"]:
            figures = f"{number(row.get('median')):>10} {number(row.get('p99')):>10}"
            more = {k: v for k, v in row.items() if k not in ("name", "median", "p99", "unit")}
            tail = "  ".join(f"{key}={number(value)}" for key, value in more.items())
            print(f"  {row['name']:<{width}} {figures} {row.get('unit', ''):<8} {tail}".rstrip())
    print(f"{len(results)} benchmarks, {sum(len(r['rows']) for r in results)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
