#!/usr/bin/env bash
# Installs the bundle, moves it, and runs it in an empty environment: every library but glibc's must come
# from the bundle, and --version must name the version. NCCL is there in a CUDA build and in no other, and the
# driver's libcuda in none.
#   bundle_test.sh CMAKE BUILD_DIR VERSION cpu|cuda
set -euo pipefail
readonly cmake=$1 build=$2 version=$3 kind=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --component bundle --prefix "$work/installed" > /dev/null
mv "$work/installed" "$work/moved"

answer=$(env -i "$work/moved/expertd" --version)
echo "$answer"
[[ $answer == "expertd $version ("*")" ]]

# Lines of the loader's trace: NAME => PATH (ADDRESS).
trace=$(env -i LD_TRACE_LOADED_OBJECTS=1 "$work/moved/expertd")
outside=$(awk '$2 == "=>" {print $3}' <<< "$trace" | grep -v "^$work/moved/lib/" |
  grep -vE '/lib(c|m|dl|rt|pthread|resolv|util|anl)\.so' || true)
[[ -z $outside ]] || { echo "loaded from outside the bundle:"; echo "$outside"; exit 1; }
[[ $(grep -c "=> $work/moved/lib/" <<< "$trace") -gt 0 ]]

nccl=0
[[ $kind == cuda ]] && nccl=1
[[ $(grep -c "=> $work/moved/lib/libnccl\.so\.2 " <<< "$trace") == "$nccl" ]] ||
  { echo "a $kind bundle, and of NCCL it has:"; grep nccl <<< "$trace" || true; ls "$work/moved/lib"; exit 1; }
! compgen -G "$work/moved/lib/libcuda.so*" || exit 1
[[ $nccl == 1 || -z $(compgen -G "$work/moved/lib/libnccl*") ]]
du -sh "$work/moved"
