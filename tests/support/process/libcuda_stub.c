/* A libcuda without a GPU: every function fails, and cuInit says that it was called.
 *
 * It has the functions that torch and SGLang's kernels are linked against. */

#include <stdio.h>
#include <string.h>

#define NO_DEVICE 100
#define FAILS(name) \
    int name(void) { return NO_DEVICE; }

FAILS(cuCtxFromGreenCtx)
FAILS(cuCtxGetCurrent)
FAILS(cuCtxPopCurrent_v2)
FAILS(cuCtxPushCurrent_v2)
FAILS(cuCtxSetCurrent)
FAILS(cuDevResourceGenerateDesc)
FAILS(cuDevSmResourceSplitByCount)
FAILS(cuDeviceGet)
FAILS(cuDeviceGetAttribute)
FAILS(cuDeviceGetCount)
FAILS(cuDeviceGetDevResource)
FAILS(cuDeviceGetName)
FAILS(cuDevicePrimaryCtxGetState)
FAILS(cuDevicePrimaryCtxRetain)
FAILS(cuDeviceTotalMem_v2)
FAILS(cuFuncGetAttribute)
FAILS(cuFuncSetAttribute)
FAILS(cuFuncSetCacheConfig)
FAILS(cuGetErrorString)
FAILS(cuGreenCtxCreate)
FAILS(cuGreenCtxDestroy)
FAILS(cuGreenCtxGetDevResource)
FAILS(cuLaunchCooperativeKernel)
FAILS(cuLaunchKernel)
FAILS(cuLinkAddData_v2)
FAILS(cuLinkComplete)
FAILS(cuLinkCreate_v2)
FAILS(cuModuleGetFunction)
FAILS(cuModuleLoad)
FAILS(cuModuleLoadData)
FAILS(cuModuleLoadDataEx)
FAILS(cuModuleUnload)
FAILS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
FAILS(cuPointerGetAttribute)
FAILS(cuStreamCreate)
FAILS(cuTensorMapEncodeTiled)

int cuInit(unsigned flags) {
    fprintf(stderr, "cuInit was called\n");
    return NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags,
                        int *status) {
    if (status)
        *status = 0;
    if (!strcmp(name, "cuInit"))
        *function = cuInit;
    else if (!strcmp(name, "cuDriverGetVersion"))
        *function = cuDriverGetVersion;
    else if (!strcmp(name, "cuGetProcAddress"))
        *function = cuGetProcAddress_v2;
    else
        *function = cuDeviceGet;
    return 0;
}
