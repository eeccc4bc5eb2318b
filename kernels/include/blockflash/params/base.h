/* What the parameter structs have in common. */
#ifndef BLOCKFLASH_PARAMS_BASE_H
#define BLOCKFLASH_PARAMS_BASE_H

#include <stdint.h>

#ifdef __cplusplus
#  define BLOCKFLASH_ALIGNAS(bytes) alignas(bytes)
#else
#  define BLOCKFLASH_ALIGNAS(bytes) _Alignas(bytes)
#endif

/* Element types chosen at run time. */
#define BLOCKFLASH_DTYPE_F16 0
#define BLOCKFLASH_DTYPE_BF16 1
#define BLOCKFLASH_DTYPE_F32 2

/* A tensor map of the Tensor Memory Accelerator (CUtensorMap), encoded by the driver. */
typedef struct blockflash_tensor_map {
  BLOCKFLASH_ALIGNAS(64) uint64_t opaque[16];
} blockflash_tensor_map;

#endif
