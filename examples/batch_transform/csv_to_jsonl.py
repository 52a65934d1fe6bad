"""Converts a CSV file with a column `inputs` to JSON Lines: csv_to_jsonl.py <FILE.csv >FILE.jsonl"""

import csv
import json
import sys

for row in csv.DictReader(sys.stdin):
    print(json.dumps({"inputs": row["inputs"], "parameters": {"max_new_tokens": 4}}))
