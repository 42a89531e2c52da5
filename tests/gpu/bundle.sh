#!/bin/sh
# Copies programs and the shared libraries they load, without glibc and the driver, into a folder that
# runs on a machine with a GPU and nothing else: bundle.sh DIR PROGRAM...
# The programs look for libraries in lib/ beside themselves.
set -eu

[ $# -ge 2 ] || { echo "usage: bundle.sh DIR PROGRAM..." >&2; exit 2; }
dir=$1
shift
mkdir -p "$dir/lib"
for program in "$@"; do
  cp "$program" "$dir/"
  ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    grep -Ev '/(ld-linux[^/]*|lib(c|m|dl|rt|pthread|resolv|util|anl|cuda)\.so[^/]*)$' |
    while read -r library; do cp -L "$library" "$dir/lib/"; done
done
