"""All that several GPUs have to show, in one command and one report, with a verdict for each line.

    torchrun --nproc-per-node 8 -m lightning_cp.bench.gpus           # 2 to 8 GPUs of one machine
    python -m lightning_cp.bench.gpus --rehearse --devices 2         # on CPU, with gloo, in small

A line is a check that all ranks make together. It fails if one of them raises, dies, or does not answer in
time; then the ranks are ended and new ones begin with the next line.
"""
