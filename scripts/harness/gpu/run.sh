#!/usr/bin/env bash
# Runs the GPU stages on a machine with one NVIDIA GPU, from the packs of scripts/gpu/pack.
#
#   scripts/gpu/run [STAGE...]      roundtrips, copies, arms; all by default
#   scripts/gpu/run --dry           roundtrips and copies on the host device, small
#
#   PACKS     where the packs lie          (gpu-packs)
#   WORK      where they are opened        (/tmp/kvpatch-gpu)
#   OUT       where the result files go    (gpu-results)
#
# Each stage writes gpu-STAGE.json as it ends; copy those into docs/results and run scripts/docs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${OUT:-gpu-results}
work=${WORK:-/tmp/kvpatch-gpu}

dry=
stages=()
for argument; do
    case $argument in
    -h | --help)
        sed -n '2,12s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --dry) dry=--dry ;;
    roundtrips | copies | arms) stages+=("$argument") ;;
    *)
        echo "run: there is no stage $argument; there are roundtrips, copies and arms" >&2
        exit 2
        ;;
    esac
done

if [ -z "$dry" ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    echo "skipped: this machine has no NVIDIA GPU. The stages copy between real GPU memory and the"
    echo "host; scripts/gpu/run --dry shows on the host device that they work."
    exit 0
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export KVPATCH=1 VLLM_NO_USAGE_STATS=1 KVPATCH_STATUS_DIR="$out"

if [ -n "$dry" ]; then
    python=${PYTHON:-$root/.venv/bin/python}
    device=$(mktemp -d)
    trap 'rm -rf "$device"' EXIT
    export KVPATCH_HOST_DEVICE=${KVPATCH_HOST_DEVICE:-1GiB} KVPATCH_HOST_DEVICE_DIR=$device
    [ ${#stages[@]} -gt 0 ] || stages=(roundtrips copies)
else
    [ ${#stages[@]} -gt 0 ] || stages=(roundtrips copies arms)
    export KVPATCH_ALLOW_VLLM=${KVPATCH_ALLOW_VLLM:-0.26.0}
    KVPATCH=0 "$python" "$here/install.py" "${PACKS:-$root/gpu-packs}" "$work"
    export PYTHONPATH=$work/tree:$work/site:$work/wheels-site
fi

failed=0
for stage in "${stages[@]}"; do
    rm -f "$out/gpu-$stage.json"
    if [ "$stage" = arms ]; then
        "$python" "$here/arms.py" $dry --output "$out/gpu-arms.json" || failed=1
        continue
    fi
    # kvcached reads its layout when it is imported.
    for contiguous in true false; do
        echo "$stage, contiguous layout: $contiguous"
        KVCACHED_CONTIGUOUS_LAYOUT=$contiguous "$python" "$here/stages.py" "$stage" $dry \
            --output "$out/gpu-$stage.json" || failed=1
    done
done
exit $failed
