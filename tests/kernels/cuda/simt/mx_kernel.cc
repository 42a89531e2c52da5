#include "kernels/cuda/moe_layer/instantiations/mx.cu"
