# L1 at nano: L with eps 1, the control for the loop without the eps.
base = "L_nano.py"
arm = "L1"
eps = 1.0
