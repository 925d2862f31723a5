# L1 at 1b: L with eps 1, the control for the loop without the eps.
base = "L_1b.py"
arm = "L1"
eps = 1.0
