#!/usr/bin/env bash
# One would guess: fitting lifetimes of which none ended (all right-censored) raises an error, or gives infinity.
# Seen (scipy 1.17.1, 2026-11-27): expon.fit of CensoredData returns a mean of 6.3e28 without an error or a warning,
#   whatever the unit and the number of observations; weibull_min.fit returns a shape of about 1e-13.
# Where it bites: a cluster that has not failed yet gets a mean time to failure from which a checkpoint interval, or a
#   price of spot instances, is computed in earnest. Check that at least one lifetime ended.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q scipy==1.17.1
"$folder/env/bin/python" -W error - <<'PY'
import numpy as np
from scipy import stats

for number, hours in ((5, 24.0), (50, 24.0), (50, 86400.0)):
    alive = stats.CensoredData.right_censored(np.full(number, hours), np.ones(number, bool))
    _, mean = stats.expon.fit(alive, floc=0)
    shape, _, _ = stats.weibull_min.fit(alive, floc=0)
    print(f"{number} machines that ran for {hours:g} without a failure: mean {mean:.3g}, Weibull's shape {shape:.3g}")
    assert mean > 1e28 and shape < 1e-10
PY
