#!/usr/bin/env python3
"""The table "One row" of docs/KERNELS.md from what `cuda_ops --token` printed.
usage: ops-table.py OPS.txt"""
import re
import sys

Q8 = "Q8_0 "
SIX = "6 of 2304x5120, "
# Op, shape, and what it is in a model.
ROWS = [
    ("matmul", Q8 + "1280x5120, 1 rows", "query latent"),
    ("matmul", Q8 + "32768x1280, 1 rows", "query heads"),
    ("matmul", Q8 + "512x5120, 1 rows", "window row"),
    ("matmul", Q8 + "8192x4096 in 8 groups, 1 rows", "grouped output"),
    ("matmul", Q8 + "5120x8192, 1 rows", "output"),
    ("matmul", Q8 + "2304x5120, 1 rows", "a shared expert's first matrix"),
    ("matmul", Q8 + "5120x2304, 1 rows", "its second matrix"),
    ("matmul_pair", Q8 + "2304x5120, Q8_0 2304x5120, 1 rows", "both of its first matrices"),
    ("matmul", "F16 25600x6144, 1 rows", "Engram"),
    ("matmul", "F32 24x20480, 1 rows", "hyper-connection mix"),
    ("matmul", "F32 384x5120, 1 rows", "router"),
    *[("matmul", f"{ty} 27648x5120, 1 rows", "as large as six pairs of first matrices")
      for ty in ("Q8_0", "Q6_K", "Q4_K", "Q3_K", "Q2_K", "IQ2_XXS", "MXFP4")],
    ("experts_row", SIX + "IQ2_XXS, Q2_K", "six experts, Q2 file"),
    ("experts_row", SIX + "Q2_K, IQ2_XXS", "the types exchanged"),
    ("experts_row", SIX + "Q4_K, Q4_K", "Q4 file"),
    ("experts_row", SIX + "Q8_0, Q8_0", ""),
    ("experts_row", SIX + "MXFP4, MXFP4", ""),
    ("attention", "1x64x512, 128+512 at 5000", "window and 512 rows, `exact`"),
    ("attention", "1x64x512, 128+512 at 5000, fast", ""),
    ("attention", "1x64x512, 128+0 at 5000, fast", "window alone"),
    ("index_scores", "1 rows, 32x128, 32000 keys", ""),
    ("select_rows", "1 rows, best 512 of 32768", ""),
    ("select_rows", "1 rows, best 512 of 32768, masked", "among marked blocks"),
    ("candidate_blocks", "1 rows, best 2048 of 4096", ""),
    ("hc_enter", "F16 1x4x5120, carried weights", "weights of the sublayer before"),
    ("hc_enter", "F16 1x4x5120, own weights", "V4"),
    ("hc_expand", "1x4x5120", ""),
    ("route", "1 rows, 6 of 384", ""),
    ("combine_experts", "1x6x5120", ""),
    ("engram_gate", "1x4x5120", ""),
    ("rms_norm", "1x5120", ""),
    ("rope", "1x64x512, 64 at 30000", ""),
    ("round_cache", "512 values, FP8 of 32", ""),
    ("round_cache", "512 values, FP4 of 32", ""),
    ("store_rows", "1x512 at 639 of 640", ""),
    ("pool_pairs", "1x512 at 7", ""),
    ("swiglu", "2304", ""),
    ("embed", Q8 + "1 of 1000x5120, 4 copies", ""),
    ("best_of", "129280 values", ""),
    ("draw", "flat", ""),
    ("draw", "flat, k 40", "the 40 best"),
]

LINE = re.compile(r"^(\w+) +(.*?) +(?:same bits|[\d.e-]+) +\d+e-?\d+ +([\d.]+) +[\d.]+ +([\d.]+) +([\d.]+) +(\d+) %")
PART = re.compile(r"^    (\w+) +([\d.]+) +([\d.]+) +(\d+) %")


def row(op, what, started, recorded, gbs, share, copy):
    print(f"| {op} | {what} | {float(gbs) * float(recorded) / copy:.1f} | {started} | {float(recorded):.1f} | {float(gbs):.0f} | {share} % |")


def main():
    lines = open(sys.argv[1]).read().splitlines()
    copy = float(re.search(r"device copy: (\d+)", "\n".join(lines))[1])
    found, parts = {}, {}
    for line in lines:
        if match := LINE.match(line):
            last = match[1], match[2]
            found.setdefault(last, match.groups()[2:])
        elif (match := PART.match(line)) and found:
            parts.setdefault(last, []).append(match.groups())
    print("| op | shape | bound us | started us | recorded us | GB/s | of the bound |\n|---|---|---|---|---|---|---|")
    for op, shape, note in ROWS:
        if (op, shape) not in found:
            print(f"ops-table.py: no line of {op} {shape}", file=sys.stderr)
            continue
        started, *rest = found[op, shape]
        row(op, f"{shape} ({note})" if note else shape, f"{float(started):.1f}", *rest, copy)
        for name, *rest in parts.get((op, shape), []):
            row("", f"its kernel `{name}` alone", "", *rest, copy)


main()
