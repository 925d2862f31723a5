# L at flip: 6 stored blocks, each applied twice, eps = 1/(2 sqrt 6) = .2041. The same FLOPs a token as V.
base = "V_flip.py"
arm = "L"
expect_params = 81_110_784

n_layer = 6
n_loop = 2
