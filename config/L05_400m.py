# L05 at 400m: L with eps 0.5, as published at small scale; the plan's fallback, a named arm that never poses as L.
base = "L_400m.py"
arm = "L05"
eps = 0.5
