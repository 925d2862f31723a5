# L at 400m: 10 stored blocks, each applied twice, eps = 1/(2 sqrt 10) = .1581. The same FLOPs a token as V.
base = "V_400m.py"
arm = "L"
expect_params = 437_681_664

n_layer = 10
n_loop = 2
