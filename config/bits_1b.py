# bits_1b: 24 blocks at d = 2048 on the bits of WikiText-103, sharded over 4 ranks: the 1.2B run of an ancestor that never happened.
#   torchrun --nproc_per_node=4 train.py config/bits_1b.py
arm = "V"
rung = "bits_1b"
expect_params = 1_214_359_552

vocab_size = 2  # bits, the most significant first, no EOT
n_layer = 24
n_embd = 2048
n_head = 16
ffn_hidden = 5504
window = 512

data = "data/bits"
unique_tokens = 3_000_000_000
val_tokens = 8_000_000
epochs = 0.34953  # 2,000 steps
batch = 1024  # x 512 = 2^19 tokens
micro_batch = 32

lr = 3e-4
warmup = 200
eval_every = 250
save_every = 250

parallel = "fsdp"
ckpt = "all"
compile = True
