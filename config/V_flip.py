# V at flip: the published small-scale setting on one GPU in an hour, 12 blocks x 1. 12.5M unique tokens, 20,000 steps of 12,288 tokens.
arm = "V"
rung = "flip"
expect_params = 123_587_328

vocab_size = 50_304  # GPT-2's 50,257 rounded up to a multiple of 64
n_layer = 12
n_embd = 768
n_head = 12
ffn_hidden = 2048
window = 1024
tied = True

data = "data/flip"
unique_tokens = 12_500_000
val_tokens = 1_000_000
epochs = 19.661  # 20,000 steps
batch = 12
micro_batch = 12

lr = 6e-4
warmup = 200
eval_every = 250
save_every = 2000

loss_chunks = 4
compile = True
