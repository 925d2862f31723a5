# L1 at flip: L with eps 1, the control for the loop without the eps.
base = "L_flip.py"
arm = "L1"
eps = 1.0
