# V at nano: the vanilla arm, 6 blocks x 1, on 32,000 bytes of the standard library. Minutes on a CPU; a check of the plumbing.
arm = "V"
rung = "nano"
expect_params = 334_784

vocab_size = 257  # 256 bytes + EOT
n_layer = 6
n_embd = 64
n_head = 4
ffn_hidden = 176
window = 128

data = "data/nano"
unique_tokens = 32_000
val_tokens = 150_000
epochs = 20
batch = 16
micro_batch = 16

lr = 2e-3
warmup = 30
eval_every = 15
save_every = 100
