// A CUDA device that computes nothing, so that a CPU build of PyTorch takes fake tensors (FakeTensorMode) on "cuda".
//
// PyTorch asks two objects about CUDA that come with its CUDA build: the guard, which switches devices and streams, and the
// hooks. Here both are registered before PyTorch looks for them, and do nothing.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
    c10::Device first() const { return {c10::DeviceType::CUDA, 0}; }
    c10::Stream stream() const noexcept { return c10::Stream(c10::Stream::DEFAULT, first()); }
    c10::Device exchangeDevice(c10::Device) const override { return first(); }
    c10::Device getDevice() const override { return first(); }
    c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex current_device() const override { return 0; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    int getNumGPUs() const override { return 1; }
};

}  // namespace

namespace at {
using CUDAHooks = Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
