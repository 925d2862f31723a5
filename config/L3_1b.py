# L3 at 1b: 8 stored blocks, each applied three times, eps = 1/(3 sqrt 8) = .1179: a point on the axis of N.
base = "V_1b.py"
arm = "L3"
expect_params = 610_830_336

n_layer = 8
n_loop = 3
