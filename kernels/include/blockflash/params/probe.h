/* Parameters of the probes. */
#ifndef BLOCKFLASH_PARAMS_PROBE_H
#define BLOCKFLASH_PARAMS_PROBE_H

#include <stdint.h>

/* The unit that a probe keeps busy. */
#define BLOCKFLASH_PROBE_MMA_F16 0
#define BLOCKFLASH_PROBE_MMA_BF16 1
#define BLOCKFLASH_PROBE_MMA_E4M3 2
#define BLOCKFLASH_PROBE_EXP2 3
#define BLOCKFLASH_PROBE_READ 4
#define BLOCKFLASH_PROBE_COPY 5
#define BLOCKFLASH_PROBE_WGMMA_F16 6
#define BLOCKFLASH_PROBE_WGMMA_BF16 7
#define BLOCKFLASH_PROBE_WGMMA_E4M3 8
#define BLOCKFLASH_PROBE_BULK 9

/* Probe: one unit of the GPU at its peak rate, as a ceiling for measurements. */
typedef struct blockflash_probe_params {
  const void* input;  /* [bytes]; matrix probes multiply its beginning */
  void* output;       /* 4 bytes per thread of the grid; [bytes] for a copy */
  int64_t bytes;      /* a multiple of 16384, at least 65536 */
  int32_t iterations; /* of the inner loop, or passes over the input */
} blockflash_probe_params;

#endif
