# L1 at 400m: L with eps 1, the control for the loop without the eps.
base = "L_400m.py"
arm = "L1"
eps = 1.0
