# V at 1b: the vanilla arm, 24 blocks x 1. 3B unique tokens, 5 epochs, 7,153 steps of 2^21 tokens.
arm = "V"
rung = "1b"
expect_params = 1_420_396_544

vocab_size = 50_304  # GPT-2's 50,257 rounded up to a multiple of 64
n_layer = 24
n_embd = 2048
n_head = 16
ffn_hidden = 5504
window = 4096

data = "data/1b"
unique_tokens = 3_000_000_000
val_tokens = 20_000_000
epochs = 5
batch = 512  # x 4096 = 2^21 tokens
micro_batch = 4

lr = 6e-4  # run.sh passes the probe's winner as --lr
warmup = 2000
eval_every = 250
save_every = 500

parallel = "fsdp"
ckpt = "none"  # plan.py: fits 80 GB in every arm; "all" recomputes every forward, about 31% more compute
loss_chunks = 8
compile = True
