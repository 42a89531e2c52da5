#include "kernels/cuda/moe_layer/instantiations/nv.cu"
