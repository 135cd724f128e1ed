/* What torch's CUDA build asks of a driver before it dispatches an operator: answers for a machine that has none.
   Loaded with LD_PRELOAD; the capability is CUDA_DISPATCH_CAPABILITY, such as 90. */
#include <driver_types.h>
#include <stdlib.h>

signed char labkit_gpus; /* 0 until torch has replaced its device guard, which it does only where there is no GPU */

static struct cudaDeviceProp *properties(void) {
    static struct cudaDeviceProp gpu;
    int capability = atoi(getenv("CUDA_DISPATCH_CAPABILITY"));
    gpu.major = capability / 10;
    gpu.minor = capability % 10;
    gpu.multiProcessorCount = 132;
    return &gpu;
}

/* c10::cuda::device_count(), at::cuda::getCurrentDeviceProperties(), at::cuda::getDeviceProperties(signed char) */
signed char _ZN3c104cuda12device_countEv(void) { return labkit_gpus; }
struct cudaDeviceProp *_ZN2at4cuda26getCurrentDevicePropertiesEv(void) { return properties(); }
struct cudaDeviceProp *_ZN2at4cuda19getDevicePropertiesEa(signed char device) { return properties(); }

/* libcuda.so.1, as far as torch's libcaffe2_nvrtc.so links it: no context exists */
