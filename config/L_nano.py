# L at nano: 3 stored blocks, each applied twice, eps = 1/(2 sqrt 3) = .2887. The same FLOPs a token as V.
base = "V_nano.py"
arm = "L"
expect_params = 183_872

n_layer = 3
n_loop = 2
