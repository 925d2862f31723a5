# VE at 1b: V with L's eps, the control for the eps without the loop.
base = "V_1b.py"
arm = "VE"
eps = 1 / (2 * 12**0.5)
