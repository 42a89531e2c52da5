#!/bin/sh
# Runs the small GPU tests under compute-sanitizer's memcheck and synccheck.
#   run_sanitizer.sh TEST_PROGRAM [GTEST_FILTER]
# Small = the tests whose shapes a checker that slows kernels down a hundredfold still finishes.
set -eu

[ $# -ge 1 ] || { echo "usage: run_sanitizer.sh TEST_PROGRAM [GTEST_FILTER]" >&2; exit 2; }
program=$1
filter=${2:-*Small*}
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH" >&2; exit 2; }

for tool in memcheck synccheck; do
  echo "== $tool"
  # NCCL asks the driver for what may not be there: its answers are no errors of ours.
  compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 "$program" --gtest_filter="$filter" --gtest_brief=1
done
