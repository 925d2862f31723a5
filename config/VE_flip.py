# VE at flip: V with L's eps, the control for the eps without the loop.
base = "V_flip.py"
arm = "VE"
eps = 1 / (2 * 6**0.5)
