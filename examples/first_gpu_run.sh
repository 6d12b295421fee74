#!/usr/bin/env bash
# Verifies TTrace on two accelerators in about ten minutes, and writes one file to send back: first_gpu_run.tar.gz.
# Run it from a checkout of TTrace: `examples/first_gpu_run.sh`, or with the name of another device than cuda.
set -uo pipefail
cd "$(dirname "$0")/.."

device=${1:-cuda}
out=${2:-first_gpu_run}
rm -rf "$out" "$out.tar.gz"
mkdir -p "$out"
summary=$out/summary.txt
failed=0

# say NAME EXPECTED ACTUAL
say() {
  if [ "$2" = "$3" ]; then echo "ok      $1" | tee -a "$summary"; else
    echo "WRONG   $1: exit code $3 instead of $2" | tee -a "$summary"
    failed=1
  fi
}

{
  date
  ttrace doctor
  python -m torch.utils.collect_env
} >"$out/machine.txt" 2>&1 || true

python - "$device" >"$out/values.txt" 2>&1 <<'PYTHON'
"""Generated values have the same bits on the device; sketches agree, and are the same each time."""
import sys
import torch
from ttrace.layouts.region import Region
from ttrace.values.generate import Integers, Normal, Rows, Signed, generate_values
from ttrace.values.kernels.library import choose_device_kernels
from ttrace.values.sketch import compute_sketch

device, region = sys.argv[1], Region.whole((3000, 2000))
for distribution, dtype in (
    (Normal(0.1, 0.02), torch.float32),
    (Normal(), torch.bfloat16),
    (Signed(2.0), torch.float32),
    (Integers(0, 50000), torch.int64),
    (Rows(50000, keep=0.9), torch.int64),
):
    host, there = (
        generate_values("x", region, dtype=dtype, distribution=distribution, device=place) for place in ("cpu", device)
    )
    assert torch.equal(host, there.cpu()), (distribution, dtype)
x = generate_values("y", region, dtype=torch.float32, distribution=Normal())
host, *there = (compute_sketch("y", x.to(place), region).cpu() for place in ("cpu", device, device))
assert torch.equal(*there), "a sketch is another one each time"
assert (host - there[0]).norm() <= 1e-12 * host.norm(), (host - there[0]).norm() / host.norm()
print("the same, computed by", "Triton" if choose_device_kernels(x.to(device)) else "torch")
PYTHON
say "generated values and sketches" 0 $?

# run NAME EXPECTED ARGUMENTS...
run() {
  local name=$1 expected=$2
  shift 2
  timeout 600 ttrace run --reference "python examples/$1.py --device $device" \
    --candidate "torchrun --standalone --nproc-per-node 2 examples/$1.py --device $device ${*:2}" \
    --out "$out/$name" >"$out/$name.txt" 2>&1
  say "$name" "$expected" $?
}

for example in ddp fsdp2 dtensor_tp hidden_allreduce own_split pipelining unchanged; do
  run "$example" 0 "$example"
done
run ddp-bug 1 ddp --bug loss
for example in dtensor_tp hidden_allreduce own_split pipelining unchanged; do
  run "$example-bug" 1 "$example" --bug
done

# Everything but the tensors.
tar -czf "$out.tar.gz" $(find "$out" -name '*.txt' -o -name 'report.json' -o -name 'manifest.json' -o -name 'end.json')
if [ $failed = 0 ]; then echo "Everything is as it should be. Please send $out.tar.gz."; else
  echo "Something is wrong. Please send $out.tar.gz: it says what."
fi
exit $failed
