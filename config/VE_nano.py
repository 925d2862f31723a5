# VE at nano: V with L's eps, the control for the eps without the loop.
base = "V_nano.py"
arm = "VE"
eps = 1 / (2 * 3**0.5)
