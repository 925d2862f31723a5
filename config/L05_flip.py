# L05 at flip: L with eps 0.5, as published at small scale; the plan's fallback, a named arm that never poses as L.
base = "L_flip.py"
arm = "L05"
eps = 0.5
