# L at 1b: 12 stored blocks, each applied twice, eps = 1/(2 sqrt 12) = .1443. The same FLOPs a token as V.
base = "V_1b.py"
arm = "L"
expect_params = 813_221_888

n_layer = 12
n_loop = 2
