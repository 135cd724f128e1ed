#!/usr/bin/env bash
# The ten minutes in which there is a GPU, in the repository's root:
#   OUT=folder [PY=python3] [DRY=1] bash tests/gpu/day.sh [what pytest is to run]
# What is known is written into $OUT at once, so that it is there even if the machine is taken away. Exit code 3: torch
# itself cannot compute on a GPU. DRY=1 rehearses on a CPU.
set -u
[ $# -gt 0 ] || set -- tests/gpu/test_claims.py tests/gpu/test_one_gpu.py
unset PYTHONDONTWRITEBYTECODE # otherwise every rank compiles labkit anew
PY=${PY:-python3} LIMIT=580
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} LABKIT_GPU_OUT=$OUT
[ "${DRY:-}" != 1 ] || export LABKIT_GPU_REHEARSAL=1
# torchrun --standalone connects to the machine's own name, and hangs if that has no address.
getent hosts "$(hostname)" >/dev/null || echo "127.0.0.1 $(hostname)" >>/etc/hosts
{
  date
  uname -a
  nproc
  df -h /dev/shm /tmp
  cat /etc/hosts
  timeout -k 5 20 nvidia-smi
  ls -l /proc/driver/nvidia/version /dev/nvidia* /dev/dxg
} >"$OUT/facts.txt" 2>&1
# Reads gigabytes of CUDA's libraries from a cold disk before anything is timed.
warm() {
  timeout -k 5 $((LIMIT / 2)) "$PY" - <<'END'
import torch, torch.distributed.run, torch._dynamo
print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.get_arch_list())
x = torch.ones(64, 64, device="cuda")
print(float((x @ x).sum()))
END
}
warm >>"$OUT/facts.txt" 2>&1 || [ "${DRY:-}" = 1 ] || { tail -n 3 "$OUT/facts.txt"; exit 3; }
timeout -k 5 60 "$PY" -m labkit.cli doctor --json >"$OUT/doctor.json" 2>>"$OUT/facts.txt"
echo "the suite starts at $SECONDS s" | tee -a "$OUT/facts.txt"
export LABKIT_GPU_SECONDS=$((LIMIT - 15 - SECONDS))
timeout -k 5 -s INT $((LIMIT - 10 - SECONDS)) \
  "$PY" -m pytest -o addopts= -p no:cacheprovider -ra "$@" >"$OUT/pytest.log" 2>&1
tail -n 40 "$OUT/pytest.log" | cut -c1-300
echo "ended at $SECONDS s"
