"""Where the arrays of each model live: one file per model, one function per plan.

A plan is the keyword arguments of `shardc.function`. It says where a few arrays live; what it does not name, the
compiler places. Weights are split by a dimension counted from the last, so that a rule holds for one layer's weights
and for those of all layers stacked. `pipeline` says besides that the model runs in stages; `stages.between` says where
one ends.
"""

from examples.plans import bert, dlrm, gpt2, llama, mixer, mlp, moe, ppo, resnet, stages, t5, unet, vit

__all__ = ["bert", "dlrm", "gpt2", "llama", "mixer", "mlp", "moe", "ppo", "resnet", "stages", "t5", "unet", "vit"]
