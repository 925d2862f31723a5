# VE at 400m: V with L's eps, the control for the eps without the loop.
base = "V_400m.py"
arm = "VE"
eps = 1 / (2 * 10**0.5)
