# V at 400m: the vanilla arm of the gate, 20 blocks x 1. 1.5B unique tokens, 5 epochs, 3,576 steps of 2^21 tokens.
base = "V_1b.py"
rung = "400m"
expect_params = 720_827_904

n_layer = 20
n_embd = 1536
n_head = 12
ffn_hidden = 4096

data = "data/400m"
unique_tokens = 1_500_000_000
warmup = 1000
